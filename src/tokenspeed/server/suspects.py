"""The requests that may be what ranks are lost of: they run one at a time, so that it shows which one is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from tokenspeed.server.journal import Entry


class Suspects:
    """Gives the ranks the next suspect once the one that runs has a token, or has ended."""

    def __init__(self, submit: Callable[[Entry], None]) -> None:
        self._submit = submit
        self._waiting: deque[Entry] = deque()
        self._running: Entry | None = None

    def __contains__(self, entry: Entry | None) -> bool:
        """Whether the ranks have not been given this one yet."""
        return entry in self._waiting

    def begin(self, entries: Iterable[Entry]) -> None:
        """These are the suspects that new ranks have to compute."""
        self._waiting = deque(entries)
        self._next()

    def clear(self) -> None:
        """There are no ranks to compute any."""
        self._waiting.clear()
        self._running = None

    def acquit(self, request_id: str) -> None:
        """A request has a token, or has ended."""
        if self._running is not None and self._running.request_id == request_id:
            self._next()

    def drop(self, entry: Entry) -> None:
        """A request has ended, wherever it was."""
        if entry in self._waiting:
            self._waiting.remove(entry)
        self.acquit(entry.request_id)

    def _next(self) -> None:
        self._running = self._waiting.popleft() if self._waiting else None
        if self._running is not None:
            self._submit(self._running)
