"""Copies of classes and of their instances, made empty first so that cycles close."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

# What type() must know at creation; everything else is set afterwards.
_AT_CREATION = ("__module__", "__qualname__", "__slots__", "__orig_bases__", "__parameters__", "_is_protocol")
# Made by metaclasses for each class anew, or a hook that only concerns new subclasses.
_NOT_COPIED = frozenset({*_AT_CREATION, "_abc_impl", "_backward_cls", "__init_subclass__"})


def empty_class(cls: type, bases: tuple[type, ...], metaclass: type, run_metaclass: bool) -> type:
    """A class like `cls` without its members; an enum has its members already.

    `run_metaclass` is False where the metaclass is user code, whose effects are not wanted twice.
    """
    if isinstance(cls, enum.EnumMeta):
        return _empty_enum(cls, bases, metaclass)
    known = {name: vars(cls)[name] for name in _AT_CREATION if name in vars(cls)}
    if run_metaclass:
        return metaclass(cls.__name__, bases, known)
    return type.__new__(metaclass, cls.__name__, bases, known)


def members_to_copy(cls: type, copy: type) -> Iterator[tuple[str, Any]]:
    """(name, value) of each class attribute that the copy needs."""
    is_enum = isinstance(cls, enum.EnumMeta)
    for name, value in list(vars(cls).items()):
        if name in _NOT_COPIED or isinstance(value, GetSetDescriptorType | MemberDescriptorType):
            continue
        if is_enum and name in vars(copy) and not isinstance(value, FunctionType):
            continue
        if is_enum and name in ("__new__", "_generate_next_value_"):
            continue
        yield name, value


def empty_instance(cls: type, value: Any, copy: Callable[[Any], Any]) -> Any:
    """An instance of `cls` like `value` without attributes, or None for a kind that cannot be made empty."""
    if isinstance(value, tuple):
        return tuple.__new__(cls, list(map(copy, value)))
    try:
        return object.__new__(cls)
    except TypeError:
        return None


def _empty_enum(cls: enum.EnumMeta, bases: tuple[type, ...], metaclass: Any) -> type:
    namespace = metaclass.__prepare__(cls.__name__, bases)
    namespace["__module__"] = cls.__module__
    namespace["__qualname__"] = cls.__qualname__
    members: dict[str, enum.Enum] = dict(cls.__members__)
    for name, member in members.items():
        namespace[name] = member._value_
    return metaclass.__new__(metaclass, cls.__name__, bases, namespace)
