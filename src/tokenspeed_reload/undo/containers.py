"""Records of dicts, lists and sets: their contents and the order of these."""

from __future__ import annotations

from collections import deque
from typing import Any

from tokenspeed_reload.undo.log import MISSING, Record


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


class DictContents(Record):
    """All entries of a dict and their order."""

    def __init__(self, target: dict[Any, Any]) -> None:
        self.target = target
        self.held = list(target.items())

    def exchange(self) -> None:
        held, self.held = self.held, list(self.target.items())
        replace_dict(self.target, held)


class ListContents(Record):
    """All elements of a list or deque."""

    def __init__(self, target: list[Any] | deque[Any]) -> None:
        self.target = target
        self.held = list(target)

    def exchange(self) -> None:
        held, self.held = self.held, list(self.target)
        if isinstance(self.target, list):
            self.target[:] = held
        else:
            self.target.clear()
            self.target.extend(held)


class SetContents(Record):
    """All elements of a set."""

    def __init__(self, target: set[Any]) -> None:
        self.target = target
        self.held = list(target)

    def exchange(self) -> None:
        held, self.held = self.held, list(self.target)
        self.target.clear()
        self.target.update(held)


def replace_dict(target: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    """Give a dict these entries in this order, without a moment in which code could see it half empty."""
    if len(target) == len(items) and all(key is other for key, (other, _) in zip(target, items, strict=True)):
        for key, value in items:
            if target[key] is not value:
                target[key] = value
        return
    held = list(target.items())  # keeps the values alive, so that no finaliser runs between the two calls
    target.clear()
    target.update(items)
    del held
