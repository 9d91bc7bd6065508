"""Records of dicts, lists and sets: their contents and the order of these.

A class of the program may derive from these and override how its objects are read and written. All is done by the
methods of the built-in class here.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection
from typing import Any

from tokenspeed_reload.undo.log import MISSING, Record, State, same, same_items
from tokenspeed_reload.values import is_a


class Entry(Record):
    """One key of a dict; the order of the others is kept, and restored when the key comes back."""

    def __init__(self, target: dict[Any, Any], key: Any) -> None:
        self.target, self.key = target, key
        self.held = target.get(key, MISSING)
        self.order = list(target)

    def exchange(self) -> None:
        held, self.held = self.held, self.target.get(self.key, MISSING)
        order, self.order = self.order, list(self.target)
        if held is MISSING:
            self.target.pop(self.key, None)
            return
        self.target[self.key] = held
        if self.held is MISSING and order[-1:] != [self.key]:
            known = [key for key in order if key in self.target]
            rest = set(known)
            items = [(k, self.target[k]) for k in (*known, *(k for k in self.target if k not in rest))]
            replace_dict(self.target, items)


class AddedEntry(Entry):
    """A key of a dict that has been written already, and was missing before."""

    def __init__(self, target: dict[Any, Any], key: Any) -> None:
        super().__init__(target, key)
        self.held = MISSING
        self.order = [known for known in self.order if known != key]


class NamedValues(Record):
    """The values under some names in a dict; what the program writes under others is its own."""

    def __init__(self, target: dict[Any, Any], names: Collection[str]) -> None:
        self.target, self.names = target, frozenset(names)
        self.held = self.read()

    def read(self) -> list[tuple[str, Any]]:
        """The names that are there, each with its value."""
        return [(key, value) for key, value in items_of(self.target) if type(key) is str and key in self.names]

    def exchange(self) -> None:
        held, self.held = self.held, self.read()
        there = {name for name, _ in self.held}
        for name, value in held:
            if name in there:
                set_item(self.target, name, value)


class DictContents(State):
    """All entries of a dict and their order."""

    def __init__(self, target: dict[Any, Any]) -> None:
        self.target = target
        self.held = items_of(target)

    def exchange(self) -> None:
        held, self.held = self.held, items_of(self.target)
        replace_dict(self.target, held)

    def differs(self) -> bool:
        return not same_items(self.held, base_of(self.target).items(self.target))


class ListContents(State):
    """All elements of a list or deque."""

    def __init__(self, target: list[Any] | deque[Any]) -> None:
        self.target = target
        self.held = elements_of(target)

    def exchange(self) -> None:
        held, self.held = self.held, elements_of(self.target)
        replace_elements(self.target, held)

    def differs(self) -> bool:
        return not same(self.held, self.target)


class SetContents(State):
    """All elements of a set."""

    def __init__(self, target: set[Any]) -> None:
        self.target = target
        self.held = elements_of(target)

    def exchange(self) -> None:
        held, self.held = self.held, elements_of(self.target)
        replace_elements(self.target, held)

    def differs(self) -> bool:
        return set(map(id, self.target)) != set(map(id, self.held))


def base_of(target: Any) -> Any:
    """The built-in class of a container, whatever its own class overrides."""
    return next(kind for kind in (OrderedDict, dict, list, deque, set, tuple, frozenset) if is_a(target, kind))


def items_of(target: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """The entries of a dict."""
    return list(base_of(target).items(target))


def elements_of(target: Any) -> list[Any]:
    """The elements of a list, deque, set or tuple."""
    return list(base_of(target).__iter__(target))


def set_item(target: Any, key: Any, value: Any) -> None:
    """Set one entry of a dict, or one element of a list."""
    base_of(target).__setitem__(target, key, value)


def replace_dict(target: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    """Give a dict these entries in this order, without a moment in which code could see it half empty."""
    held = items_of(target)  # keeps the values alive, so that no finaliser runs between the two calls
    if len(held) == len(items) and all(key is other for (key, _), (other, _) in zip(held, items, strict=True)):
        for (key, now), (_, value) in zip(held, items, strict=True):
            if now is not value:
                set_item(target, key, value)
        return
    kind = base_of(target)
    kind.clear(target)
    kind.update(target, items)
    del held


def replace_elements(target: Any, elements: list[Any]) -> None:
    """Give a list, deque or set these elements."""
    kind = base_of(target)
    if kind is list:
        list.__setitem__(target, slice(None), elements)
        return
    kind.clear(target)
    (kind.update if kind is set else kind.extend)(target, elements)
