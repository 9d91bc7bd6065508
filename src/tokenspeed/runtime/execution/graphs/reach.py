"""Which objects lead to code that is edited in place."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import (
    BuiltinMethodType,
    EllipsisType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
    SimpleNamespace,
)
from typing import Any
from weakref import WeakKeyDictionary

import torch

_ATOMS = frozenset(
    {NoneType, EllipsisType, bool, int, float, complex, str, bytes, range, slice}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
_WRAPPED = ("fn", "func", "function", "__wrapped__")


class Reach:
    """Answers whether an object is code of the packages, or wraps or contains some.

    What is looked through: closures, defaults and attributes of functions, bound methods, partials, caches,
    descriptors, containers, and objects that can be called or that hold what they wrap as `fn`, `func`,
    `function` or `__wrapped__` (jitted kernels, tuners). Not: globals of other packages, other objects.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = tuple(packages)
        self._clean: dict[int, Any] = {}

    def inside(self, module: object) -> bool:
        """Whether the module of this name belongs to the packages."""
        return isinstance(module, str) and any(_under(module, package) for package in self._packages)

    def leads_to(self, module: str) -> bool:
        """Whether the module belongs to the packages, or is a parent package of one."""
        return self.inside(module) or any(_under(package, module) for package in self._packages)

    def __call__(self, value: Any) -> bool:
        seen: dict[int, Any] = {id(value): value}
        waiting = deque([value])
        while waiting:
            current = waiting.popleft()
            if self._is_code(current):
                return True
            for part in _parts(current):
                if id(part) not in seen and id(part) not in self._clean and not is_atom(part):
                    seen[id(part)] = part
                    waiting.append(part)
        # Holding the objects keeps their ids from being used again.
        self._clean.update(seen)
        return False

    def _is_code(self, value: Any) -> bool:
        if isinstance(value, FunctionType):
            return self.inside(value.__globals__.get("__name__"))
        if isinstance(value, ModuleType):
            return self.leads_to(value.__name__)
        return self.inside((value if isinstance(value, type) else type(value)).__module__)


def is_atom(value: Any) -> bool:
    """Whether a value holds no code: numbers, text, tensors, torch's own descriptions and operators."""
    return type(value) in _ATOMS or isinstance(value, torch.Tensor | torch._ops.OperatorBase)


def slots_of(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of each filled `__slots__` entry."""
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, MemberDescriptorType):
                try:
                    yield name, member.__get__(value)
                except AttributeError:
                    continue


def closure_values(function: FunctionType) -> Iterator[Any]:
    """What the closure of a function holds, without the cells that are still empty."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            yield cell.cell_contents


def _under(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _parts(value: Any) -> Iterable[Any]:
    """The objects directly inside an object that is looked through."""
    match value:
        case FunctionType():
            named = (value.__kwdefaults__ or {}).values()
            return [*closure_values(value), *(value.__defaults__ or ()), *named, *vars(value).values()]
        case MethodType():
            return value.__func__, value.__self__
        case BuiltinMethodType():
            return () if isinstance(value.__self__, ModuleType) else (value.__self__,)
        case functools.partial():
            return [value.func, *value.args, *value.keywords.values()]
        case staticmethod() | classmethod():
            return (value.__func__,)
        case property():
            return value.fget, value.fset, value.fdel
        case list() | tuple() | set() | frozenset() | deque():
            return value
        case dict() | MappingProxyType() | WeakKeyDictionary():
            return [*value.keys(), *value.values()]
        case type() | ModuleType():
            return ()
    attributes = getattr(value, "__dict__", {})
    if callable(value) or isinstance(value, SimpleNamespace) or any(name in attributes for name in _WRAPPED):
        return [*attributes.values(), *(item for _, item in slots_of(value))]
    return ()
