"""The undo log: every write of a reload, as a record that can exchange the old state and the new one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any

from tokenspeed_reload.errors import IncompleteUndo

Items = Collection[tuple[Any, Any]]
MISSING: Any = type("MISSING", (), {"__repr__": lambda self: "MISSING"})()


class Record(ABC):
    """One place that a reload wrote to. It holds the state that is not in force."""

    @abstractmethod
    def exchange(self) -> None:
        """Put the held state in force and hold the one that was."""


class State(Record):
    """All of one thing as it was, which can tell whether it is still so."""

    @abstractmethod
    def differs(self) -> bool:
        """True when the thing is no longer what is held."""


def same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """True for the same objects in the same order."""
    return len(before) == len(now) and all(map(is_, before, now))


def same_items(before: Items, now: Items) -> bool:
    """True for the same keys and values in the same order."""
    return len(before) == len(now) and all(map(is_, chain.from_iterable(before), chain.from_iterable(now)))


class UndoLog:
    """The records of one transaction, in the order of the writes."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._seen: set[tuple[type, int]] = set()
        self._reversed = False

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def add(self, record: Record) -> None:
        """Append a record; to be called before the write."""
        self._records.append(record)

    def once(self, kind: Callable[[Any], Record], target: Any) -> None:
        """Append `kind(target)` unless the log holds that record already."""
        key = (kind, id(target))
        if key not in self._seen:
            self._seen.add(key)  # type: ignore[arg-type]
            self._records.append(kind(target))

    def insert(self, index: int, records: Sequence[Record]) -> None:
        """Put records of writes that came before those from `index` on."""
        self._records[index:index] = records

    @property
    def in_force(self) -> bool:
        """True while the new state is in force."""
        return not self._reversed

    def exchange(self) -> None:
        """Go from the new state to the old one, or back.

        Raises:
            IncompleteUndo: some records could not; the others did.
        """
        errors: list[BaseException] = []
        for record in self._records if self._reversed else reversed(self._records):
            try:
                record.exchange()
            except BaseException as error:  # the rest must be restored all the same
                errors.append(error)
        self._reversed = not self._reversed
        if errors:
            raise IncompleteUndo(errors) from errors[0]

    def clear(self) -> None:
        """Let go of the state that is not in force."""
        self._records.clear()
        self._seen.clear()
