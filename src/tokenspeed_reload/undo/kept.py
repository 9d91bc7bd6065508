"""The containers in which records keep what a reload replaced."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tokenspeed_reload.undo.log import Record

_PROBE = 0  # the identity of no object


def kept_containers(records: Iterable[Record]) -> list[Any]:
    """The lists, tuples and dicts that nothing but `records` hold; those that the program holds as well are its own."""
    kept = _Kept()
    for record in records:
        kept.take(vars(record))
    return kept.found


class _Kept:
    """Takes a container for one of the records when these hold all references to it."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {_PROBE: []}
        self._within: Counter[int] = Counter()
        self._taken: set[int] = set()
        self.found: list[Any] = []

    def take(self, container: Any) -> None:
        """Take a container, and what it and those that were taken before hold alone."""
        todo = [container]
        self._taken.add(id(container))
        while todo:
            self.found.append(todo.pop())
            for key in self._inner(self.found[-1]):
                if key not in self._taken and self._references(key) == self._within[key]:
                    self._taken.add(key)
                    todo.append(self._known[key])

    def _inner(self, container: Any) -> set[int]:
        keys: set[int] = set()
        for item in (*container.keys(), *container.values()) if type(container) is dict else container:
            if type(item) in (list, tuple, dict):
                self._known[id(item)] = item
                self._within[id(item)] += 1
                keys.add(id(item))
        return keys

    def _references(self, key: int) -> int:
        """How many references to a container there are, apart from those of this search, which the probe has too."""
        return sys.getrefcount(self._known[key]) - sys.getrefcount(self._known[_PROBE])
