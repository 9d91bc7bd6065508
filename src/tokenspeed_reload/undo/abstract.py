"""Records of abstract base classes: who is registered with them, and what they remember of other classes."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any

from tokenspeed_reload.undo.log import Record, State

_ABC: Any = abc  # with the functions that only it has


class Registrations(State):
    """The classes that were registered with an abstract base class."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.held = registered_with(target)

    def exchange(self) -> None:
        held, self.held = self.held, registered_with(self.target)
        register_only(self.target, held)

    def differs(self) -> bool:
        return set(map(id, registered_with(self.target))) != set(map(id, self.held))


class AbstractCaches(Record):
    """What abstract base classes remember of the classes that they were asked for: it goes whenever classes change."""

    def __init__(self, classes: list[Any]) -> None:
        self.held = classes

    def exchange(self) -> None:
        forget_answers(self.held)


def is_abstract(value: Any) -> bool:
    """True for an abstract base class that has its registry and caches."""
    return issubclass(type(value), abc.ABCMeta) and "_abc_impl" in vars(value)


def registered_with(cls: Any) -> list[type]:
    """The classes that are registered with an abstract base class."""
    found = (reference() for reference in _ABC._get_dump(cls)[0])
    return [value for value in found if value is not None]


def register_only(cls: Any, wanted: Iterable[type]) -> None:
    """Let exactly these classes be registered with an abstract base class."""
    _ABC._reset_registry(cls)
    _ABC._reset_caches(cls)
    for value in wanted:
        abc.ABCMeta.register(cls, value)


def forget_answers(classes: Iterable[Any]) -> None:
    """Let abstract base classes look anew at whatever they are asked for."""
    for cls in classes:
        _ABC._reset_caches(cls)
