"""Which request the ranks are lost of: told by which ones were running, and found out by running them alone.

Each loss counts against every request that was running. A request with two of them is a **suspect**. New ranks get
the suspects one after the other and nothing else, the latest first; the next one follows once the one before has got
`PROOF` tokens of them, and is cleared. A suspect that has not when they are lost, and that ran alone, is **guilty**.
So is, since a cause may strike late, any request with `MOST_LOSSES`. The guilty one ends, and the losses at which it
ran count against no other any more.

Hence a request that causes losses causes `MOST_LOSSES` at most, whatever runs beside it, and there are at most
`MOST_LOSSES` for each request that ends: a loss counts against its cause until that ends, and against no two that end
one after the other. One that always strikes before it can be cleared causes four at most: two to become a suspect, one
beside suspects that were cleared, and one alone, since those that are not cleared run first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from tokenspeed.server.journal import Entry

PROOF = 2
"""Tokens that clear a suspect: that of its prompt's step, and one that was decoded."""

MOST_LOSSES = 8


class Suspects:
    """Gives ranks the suspects one by one through `submit`, and calls `on_cleared` once they may have all the rest."""

    def __init__(self, submit: Callable[[Entry], None], on_cleared: Callable[[], None]) -> None:
        self._submit = submit
        self._on_cleared = on_cleared
        self._losses = 0
        self._waiting: deque[Entry] = deque()
        self._tried: Entry | None = None

    @property
    def trying(self) -> bool:
        """Whether the ranks get nothing but suspects now."""
        return self._tried is not None

    def lose(self, ran: Sequence[Entry], everyone: Iterable[Entry]) -> list[Entry]:
        """The ranks are lost, with these requests running of all that are open: the ones that have to end."""
        self._waiting.clear()
        self._tried = None
        self._losses += 1
        for entry in ran:
            entry.losses.add(self._losses)
        if all(entry.cleared for entry in ran):
            for entry in ran:
                entry.cleared = False
        alone = len(ran) == 1 and _is_suspect(ran[0]) and not _is_proven(ran[0])
        guilty = [entry for entry in ran if alone or len(entry.losses) >= MOST_LOSSES]
        explained = set[int]().union(*(entry.losses for entry in guilty))
        for entry in everyone:
            if entry not in guilty:
                entry.losses -= explained
        return guilty

    def begin(self, entries: Sequence[Entry]) -> None:
        """There are new ranks, which owe these, oldest first."""
        self._waiting.extend(entry for entry in reversed(entries) if _is_suspect(entry) and not entry.cleared)
        self._next()

    def progress(self, entry: Entry) -> None:
        """A request has got tokens."""
        if entry is self._tried and _is_proven(entry):
            entry.cleared = True
            self._next()

    def end(self, entry: Entry) -> None:
        """A request has ended, wherever it was."""
        if entry in self._waiting:
            self._waiting.remove(entry)
        elif entry is self._tried:
            self._next()

    def _next(self) -> None:
        self._tried = self._waiting.popleft() if self._waiting else None
        if self._tried is None:
            self._on_cleared()
        else:
            self._submit(self._tried)


def _is_suspect(entry: Entry) -> bool:
    return len(entry.losses) > 1


def _is_proven(entry: Entry) -> bool:
    return len(entry.tokens) - entry.had >= PROOF
