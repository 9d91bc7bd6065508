"""Whether all ranks are about to call the same collective, asked before each one that edited code calls.

Ranks that call unlike collectives block each other, mix up their tensors, or end a process. In a trial they first tell
each other what they are about to call, over connections of their own on the host, whatever the device is.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import torch

from tokenspeed.runtime.distributed.errors import CollectiveMismatch
from tokenspeed.runtime.distributed.gloo import GlooCommunicator
from tokenspeed.runtime.distributed.vote import Vote

RECORD_BYTES = 512
"""Of what one rank says before a collective."""

CALL_CHARACTERS = 256
"""Of it for the call itself."""

PLACES = 3
"""Innermost places of our own code on the way to a collective that a mismatch names."""

_OWN = str(Path(__file__).parent)


class Agreement:
    """Compares calls over `link`. `made` are those of this phase so far, each with its type and shape."""

    def __init__(self, link: GlooCommunicator, rank: int, size: int):
        self.link = link
        self.rank = rank
        self.size = size
        self.made: list[str] = []
        self._before: Sequence[str] | None = None
        self._like_before = True
        self._runs = True
        self._mine = torch.zeros(RECORD_BYTES, dtype=torch.uint8)
        self._all = torch.zeros(size * RECORD_BYTES, dtype=torch.uint8)
        # Their bytes: a capture refuses to read tensors, and would record copies between them.
        self._mine_bytes = self._mine.numpy()
        self._all_bytes = self._all.numpy().reshape(size, RECORD_BYTES)

    def open(self) -> None:
        """Connect. Raises RuntimeError when a rank does not come."""
        self.link.open()

    def close(self) -> None:
        """Break the connections."""
        self.link.close()

    @contextmanager
    def phase(self, before: Sequence[str] | None, vote: Vote, *, runs: bool) -> Iterator[Callable[[], None]]:
        """One phase of a reload; gives what is to be called while one of its collectives waits.

        Args:
            before: what the serving code called in this phase, None where nobody knows.
            vote: of the phase.
            runs: False where collectives are captured only. Unlike ones then do no harm yet, and are left to the vote.
        """
        self.made = []
        self._runs = runs
        self._before = before
        self._like_before = before is not None

        def attend() -> None:
            vote.attend(len(self.made), self._like_before)

        with self.link.guarded(attend):
            yield attend

    @property
    def like_before(self) -> bool:
        """Whether this rank has called just what the serving code did."""
        return self._like_before and self._before is not None and len(self.made) == len(self._before)

    @property
    def checksum(self) -> int:
        """Of the calls of this rank, 32 bits."""
        return zlib.crc32("\n".join(self.made).encode())

    def agree(self, call: str) -> None:
        """Tell `call`, such as "all_reduce float32 [4, 64]", to the others, and hear theirs.

        Raises:
            CollectiveMismatch: on every rank, when they are not all alike.
            BaseException: what attending to the vote raises while a rank does not come.
        """
        index = len(self.made)
        known = self._before is not None and index < len(self._before)
        self._like_before = self._like_before and known and self._before[index] == call  # type: ignore[index]
        self.made.append(call)
        if not self._runs:
            return
        calls, places, innocent = self._exchange(call)
        if len(set(calls)) == 1:
            return
        said = "; ".join(f"rank {rank} calls {calls[rank]} ({places[rank]})" for rank in range(self.size))
        raise CollectiveMismatch(
            f"the ranks call different collectives as number {index + 1} of this phase: {said}; every rank must call "
            "the same ones in the same order",
            culprit=_culprit(calls, innocent),
        )

    def _exchange(self, call: str) -> tuple[list[str], list[str], list[bool]]:
        """What every rank calls, where, and whether it has only called what the serving code did."""
        flag = "=" if self._like_before else "!"
        record = f"{flag}{call[:CALL_CHARACTERS]}\0{place()}".encode()[:RECORD_BYTES].ljust(RECORD_BYTES, b"\0")
        self._mine_bytes[:] = np.frombuffer(record, np.uint8)
        self.link.all_gather(self._all, self._mine, "agreement")
        heard = [part.tobytes().decode(errors="replace") for part in self._all_bytes]
        parts = [record.split("\0") for record in heard]
        return [part[0][1:] for part in parts], [part[1] for part in parts], [part[0][0] == "=" for part in parts]


def _culprit(calls: Sequence[str], innocent: Sequence[bool]) -> int:
    """Who is out of step: who left what the serving code calls, else who is in the minority, else the last rank."""
    suspects = [rank for rank in range(len(calls)) if not innocent[rank]]
    if not suspects or len(suspects) == len(calls):
        often = Counter(calls)
        suspects = [rank for rank in range(len(calls)) if often[calls[rank]] == min(often.values())]
        return suspects[-1] if len(suspects) == len(calls) else suspects[0]
    return suspects[0]


def place() -> str:
    """Where the code that calls a collective stands: `file:line` of the innermost of our own frames."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < PLACES:
        name = frame.f_code.co_filename
        if not name.startswith(_OWN) and "/torch/" not in name and not name.startswith("<"):
            found.append(f"{Path(name).name}:{frame.f_lineno or frame.f_code.co_firstlineno}")
        frame = frame.f_back
    return " < ".join(found)
