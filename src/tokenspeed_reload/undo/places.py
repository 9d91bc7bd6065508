"""Records of single attributes, of the text of a file, and of whatever has its own way to be read and written."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tokenspeed_reload.undo.log import MISSING, Record


class Participant(Protocol):
    """Something that keeps state of its own about what modules define, such as a registry.

    The reloader calls `snapshot` before the first module is executed, and exchanges the state seen then
    with the later one through `restore` when a transaction is undone or swapped. A snapshot must not be
    changed by later registrations.
    """

    def snapshot(self) -> Any:
        """The present state, as a value that later changes do not touch."""

    def restore(self, state: Any) -> None:
        """Return to a state that `snapshot` gave."""

    def withdraw(self, module: str, definitions: Mapping[str, Any]) -> None:
        """Forget what these definitions of a module registered: they are gone, or are executed again right now.

        Called between `snapshot` and `restore`, with the objects that the names held before.
        """


class Attribute(Record):
    """An attribute of an object, set or missing."""

    def __init__(self, target: Any, name: str) -> None:
        self.target, self.name = target, name
        self.held = self._read()

    def _read(self) -> Any:
        return getattr(self.target, self.name, MISSING)

    def exchange(self) -> None:
        held, self.held = self.held, self._read()
        if held is MISSING:
            if self.held is not MISSING:
                delattr(self.target, self.name)
        else:
            setattr(self.target, self.name, held)


class Exchange(Record):
    """A place with its own way to read and to write."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self.read, self.write = read, write
        self.held = read()

    def exchange(self) -> None:
        held, self.held = self.held, self.read()
        self.write(held)


class LineCache(Record):
    """The text that tracebacks show for a file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.held: Any = linecache.cache.get(path, MISSING)

    def exchange(self) -> None:
        held, self.held = self.held, linecache.cache.get(self.path, MISSING)
        if held is MISSING:
            linecache.cache.pop(self.path, None)
        else:
            linecache.cache[self.path] = held


class ParticipantState(Record):
    """The state of a participant."""

    def __init__(self, target: Participant) -> None:
        self.target = target
        self.held = target.snapshot()

    def exchange(self) -> None:
        held, self.held = self.held, self.target.snapshot()
        self.target.restore(held)
