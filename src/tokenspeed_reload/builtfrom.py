"""What code that runs once was made of when it ran: an edit that is taken back leaves nothing to name."""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

from tokenspeed_reload.codes import redirected_to
from tokenspeed_reload.undo import FunctionCode, FunctionState, UndoLog
from tokenspeed_reload.values import is_a, is_atom, meaning_of

ABSENT: Any = ("absent",)
_LARGEST = 10_000
_DEPTH = 6

Print = tuple[Any, ...]
"""Equal for what does the same. One that holds anything without such a comparison equals nothing but itself."""


class BuiltFrom:
    """The prints of run-once functions and values before their first edit, by dotted name."""

    def __init__(self) -> None:
        self._first: dict[str, Print] = {}

    def first(self, name: str, before: Print) -> Print:
        """The print of `name` at the start; `before` is the one before the present edit."""
        return self._first.get(name, before)

    def keep(self, first: Mapping[str, Print]) -> None:
        """Remember the prints of what is edited now, once that is final."""
        self._first.update(first)


def print_of(function: FunctionType, code: CodeType | None = None) -> Print:
    """The print of a function, if it ran `code`; without that, of what it runs."""
    target = redirected_to(function) if code is None else None
    if type(target) is FunctionType:
        return print_of(target)
    return _print(code or function.__code__, function.__defaults__, function.__kwdefaults__)


def print_of_value(value: Any) -> Print:
    """The print of a value, containers with what they hold."""
    room = [_LARGEST]
    return _snapshot(value, _DEPTH, room)


def prints_before(log: UndoLog) -> dict[int, Print]:
    """The prints that functions had before the writes of a log, by identity of the function."""
    found: dict[int, Print] = {}
    for record in log:
        if isinstance(record, FunctionState) and id(record.target) not in found:
            found[id(record.target)] = _print(*record.held[0][:3])
        elif isinstance(record, FunctionCode) and id(record.target) not in found:
            found[id(record.target)] = print_of(record.target, record.held)
    return found


def _print(code: CodeType, defaults: Any, kwdefaults: Any) -> Print:
    return (meaning_of(code), print_of_value(defaults), print_of_value(kwdefaults))


def _snapshot(value: Any, depth: int, room: list[int]) -> Print:
    room[0] -= 1
    kind = type(value)
    if is_atom(value):
        return (kind, repr(value))
    if is_a(value, FunctionType | type):
        return (kind, value.__module__, value.__qualname__)
    if depth == 0 or room[0] < 0:
        return (object(),)
    if kind in (list, tuple):
        return (kind, *(_snapshot(item, depth - 1, room) for item in value))
    if kind is dict:
        return (kind, *((_snapshot(k, depth - 1, room), _snapshot(v, depth - 1, room)) for k, v in value.items()))
    return (object(),)
