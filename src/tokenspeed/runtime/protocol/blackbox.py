"""What a rank was at when it ended: in a file, since messages on their way are lost with the process that sent them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

LARGEST = 2**20
"""Bytes after which the file is begun anew."""


class BlackBox:
    """What a rank works on, noted before the work begins. One that is not open notes nothing.

    Each note is one unbuffered write: it outlives the process however that ends, and costs microseconds.
    """

    def __init__(self, rank: int, run_dir: Path):
        self.path = _path(run_dir, rank)
        self._size = 0
        self._file: int | None = None

    def open(self) -> None:
        """Begin an empty file."""
        fresh = self.path.with_suffix(".new")
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        fresh.replace(self.path)
        self.close()
        self._file, self._size = file, 0

    def close(self) -> None:
        """Note nothing more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @contextmanager
    def taking(self, request_id: str) -> Iterator[None]:
        """The block takes a request in, which waits then. What it raises ends the rank."""
        self._note(f"takes {request_id}\n")
        yield
        self._note("took\n")

    def runs(self, request_ids: Iterable[str]) -> None:
        """Steps from here on compute these too."""
        self._note("".join(f"runs {request_id}\n" for request_id in request_ids))

    def reloads(self, call_id: str, state: str) -> None:
        """A reload comes to one of its states."""
        self._note(f"{state} {json.dumps(call_id)}\n")

    @property
    def full(self) -> bool:
        """Whether it is time for `open`, and for `runs` with all that run."""
        return self._size > LARGEST

    def _note(self, text: str) -> None:
        if self._file is not None:
            with suppress(OSError):  # a disk without room costs the record, not the rank
                self._size += os.write(self._file, text.encode())


class Work(msgspec.Struct, frozen=True):
    """What ranks worked on when they ended; some of it may have been done before."""

    ran: frozenset[str] = frozenset()
    """Ids of requests in steps."""
    taken: frozenset[str] = frozenset()
    """Ids of requests that were being taken in."""
    reload: tuple[str, str] | None = None
    """Id of the last reload that did not only wait, and its state."""


def read_work(run_dir: Path, size: int) -> Work:
    """What the `size` ranks of this directory, which have ended, left in their black boxes."""
    ran: set[str] = set()
    taken: set[str] = set()
    reload = None
    # Rank 0 last: it is the one that tells of reloads otherwise.
    for rank in reversed(range(size)):
        taking = None
        for line in _lines(_path(run_dir, rank)):
            word, _, rest = line.partition(" ")
            taking = rest if word == "takes" else None
            if word == "runs":
                ran.add(rest)
            elif rest.startswith('"') and rest.endswith('"'):
                reload = json.loads(rest), word
        if taking is not None:
            taken.add(taking)
    return Work(frozenset(ran), frozenset(taken), reload)


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / f"blackbox{rank}"


def _lines(path: Path) -> list[str]:
    """The whole lines of the file; the last one may have been cut off."""
    try:
        return path.read_text(errors="replace").split("\n")[:-1]
    except OSError:
        return []
