"""Records of classes and of instances."""

from __future__ import annotations

import gc
from types import MemberDescriptorType
from typing import Any

from tokenspeed_reload.undo.containers import replace_dict
from tokenspeed_reload.undo.log import MISSING, Record, State, same, same_items

_HEAP_TYPE = 1 << 9
_FIXED_MEMBERS = frozenset({"__dict__", "__weakref__", "_abc_impl"})


class ClassState(State):
    """The members of a class with their order, and its bases."""

    def __init__(self, target: type) -> None:
        self.target = target
        self.held = self.read()

    def read(self) -> tuple[tuple[type, ...], list[tuple[str, Any]]]:
        """The bases, and the members in their order."""
        return self.target.__bases__, list(self.target.__dict__.items())

    def differs(self) -> bool:
        bases, members = self.held
        return not same(bases, self.target.__bases__) or not same_items(members, self.target.__dict__.items())

    def exchange(self) -> None:
        (bases, members), self.held = self.held, self.read()
        if self.target.__bases__ != bases:
            self.target.__bases__ = bases
        set_members(self.target, members)


class InstanceState(Record):
    """The `__dict__` of an instance."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.held = list(self._state().items())

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = object.__getattribute__(self.target, "__dict__")
        return state

    def exchange(self) -> None:
        held, self.held = self.held, list(self._state().items())
        replace_dict(self._state(), held)


class InstanceSlots(State):
    """The values in the slots of an instance."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.held = slots_of(target)

    def exchange(self) -> None:
        held, self.held = self.held, slots_of(self.target)
        for (slot, value), (_, now) in zip(held, self.held, strict=True):
            if value is now:
                continue
            if value is MISSING:
                slot.__delete__(self.target)
            else:
                slot.__set__(self.target, value)

    def differs(self) -> bool:
        return not same_items(self.held, slots_of(self.target))


class InstanceClass(State):
    """The class of an instance."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.held = type(target)

    def exchange(self) -> None:
        held, self.held = self.held, type(self.target)
        set_class(self.target, held)

    def differs(self) -> bool:
        return type(self.target) is not self.held


def slots_of(target: Any) -> list[tuple[Any, Any]]:
    """The slots of an instance, as (descriptor, value or MISSING)."""
    found: list[tuple[Any, Any]] = []
    for cls in type(target).__mro__:
        if "__slots__" not in vars(cls) or not cls.__flags__ & _HEAP_TYPE:
            continue
        for member in vars(cls).values():
            if type(member) is MemberDescriptorType:
                try:
                    found.append((member, member.__get__(target)))
                except AttributeError:
                    found.append((member, MISSING))
    return found


def set_class(target: Any, cls: type) -> None:
    """Assign the class of an instance, which its own `__setattr__` may forbid; raises TypeError."""
    object.__setattr__(target, "__class__", cls)


def set_members(cls: type, members: list[tuple[str, Any]]) -> None:
    """Give a class these members in this order; `__dict__` and slots stay what they are."""
    wanted = dict(members)
    for name in list(cls.__dict__):
        if name not in wanted and name not in _FIXED_MEMBERS:
            type.__delattr__(cls, name)
    for name, value in members:
        if cls.__dict__.get(name, MISSING) is not value and name not in _FIXED_MEMBERS:
            type.__setattr__(cls, name, value)
    if list(cls.__dict__) != [name for name, _ in members]:
        # The values are those that type.__setattr__ has announced already: only the order is written here.
        (mapping,) = (r for r in gc.get_referents(cls.__dict__) if type(r) is dict)
        replace_dict(mapping, [(name, cls.__dict__[name]) for name, _ in members])
