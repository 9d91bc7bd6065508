"""How far the work of this process has come: written by its main thread, read by a thread that watches it.

A watcher cannot tell a long computation from an endless one but by what it passes on its way. Two kinds of marks
count: steps (a batch, a captured graph, a compile), and the launches and collectives within one. Of the latter only
so many count between two steps, so that a loop that launches for ever is not taken for progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

MOST_LAUNCHES = 20_000
"""Launches and collectives that count between two steps; the largest models have a few thousand."""


class Progress:
    """Marks of one process.

    `count` rises with every mark; `what` is the last one. `waiting_for` is what of the other ranks the main thread
    waits for, None while it works: who stands still without waiting holds up the rest.
    """

    def __init__(self) -> None:
        self.count = 0
        self.what = ""
        self.waiting_for: str | None = None
        self._launches = 0

    def step(self, what: str) -> None:
        """Something of some size begins or is done: a batch, a graph, a compile, a phase."""
        self._launches = 0
        self.count += 1
        self.what = what

    def launch(self, what: str) -> None:
        """A kernel or a collective is launched."""
        self.what = what
        if self._launches < MOST_LAUNCHES:
            self._launches += 1
            self.count += 1

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """The block waits for other ranks."""
        before, self.waiting_for = self.waiting_for, what
        try:
            yield
        finally:
            self.waiting_for = before


PROGRESS = Progress()
"""Of this process."""
