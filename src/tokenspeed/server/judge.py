"""Whether a set of ranks still gets on: one that computes for ever, or not at all, is lost."""

from __future__ import annotations

import linecache
import time
from collections.abc import Callable
from pathlib import Path

from tokenspeed.runtime.protocol.state import A_DOWNLOAD, SIGN_INTERVAL_S, Sign
from tokenspeed.server.errors import EngineLost

TICK = SIGN_INTERVAL_S
"""Seconds between two looks."""

LONGEST_TICK = 2 * TICK
"""What a look counts at most: while this process itself stood still, with the machine perhaps, nobody could be heard.
"""

AT_REST = ("messages", A_DOWNLOAD)
"""What rank 0 waits for when there is nothing to do, or nothing that it could hasten; the others wait for rank 0."""

FRESH = 10.0
"""Seconds for which a rank's last sign tells what it does; two thirds of the limit, where that is less."""


class Judge:
    """Hears the signs of `size` ranks, and calls the set lost once no rank has passed a mark for `limit()` seconds.

    Time at rest does not count: rank 0 waits for the front then, or for a download, and the others for rank 0. Nor does
    time in which a rank is held by a debugger. A limit of 0 is none. `pid` tells a rank's process.
    """

    def __init__(
        self,
        size: int,
        limit: Callable[[], float],
        pid: Callable[[int], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._pid = pid
        self._clock = clock
        self._looked = clock()
        self._now = 0.0
        """Seconds that this process has been running, as far as it looked."""
        self._since = 0.0
        """When a mark was last passed, or the ranks were last at rest."""
        self._last_limit: float | None = None
        self._signs: list[Sign | None] = [None] * size
        self._heard = [0.0] * size

    def hear(self, sign: Sign) -> None:
        """Take in what a rank tells."""
        before = self._signs[sign.rank]
        if before is None or before.count != sign.count:
            self._since = self._now
        self._signs[sign.rank] = sign
        self._heard[sign.rank] = self._now

    def look(self) -> EngineLost | None:
        """Let the time pass that has passed; why the ranks are lost, or None."""
        now = self._clock()
        self._now += min(now - self._looked, LONGEST_TICK)
        self._looked = now
        limit = self._limit()
        # Under another limit they do something else, of which the last sign may not tell yet.
        if limit != self._last_limit or self._at_rest() or self._debugged():
            self._since, self._last_limit = self._now, limit
        return self._loss(limit) if limit and self._now - self._since > limit else None

    def place(self, error: EngineLost) -> EngineLost:
        """Add to `error` where its rank was last seen, if that is known."""
        sign = None if error.rank is None else self._signs[error.rank]
        if sign is not None and sign.file and sign.waiting_for is None:
            error.file, error.line = sign.file, sign.line
            linecache.checkcache(sign.file)
            error.text = linecache.getline(sign.file, sign.line).strip() or None
        return error

    def _loss(self, limit: float) -> EngineLost:
        rank = self._culprit()
        sign = self._signs[rank]
        fresh = self._is_fresh(rank)
        sentence = f"rank {rank} has {'not got on' if fresh else 'given no sign of life'} for {limit:g} s"
        if sign is not None:
            sentence += f", {'' if fresh else 'last '}seen in {sign.function or 'its code'}"
            sentence += f" after {sign.what}" if sign.what else ""
        return self.place(EngineLost(sentence, rank=rank))

    def _culprit(self) -> int:
        """Who holds up the others: one of whom nothing is heard, else one who waits for nobody."""
        ranks = range(len(self._signs))
        silent = [rank for rank in ranks if not self._is_fresh(rank)]
        working = [rank for rank in ranks if (sign := self._signs[rank]) is not None and sign.waiting_for is None]
        return (silent or working or list(ranks))[0]

    def _is_fresh(self, rank: int) -> bool:
        limit = self._limit()
        fresh = min(FRESH, limit * 2 / 3) if limit else FRESH
        return self._signs[rank] is not None and self._now - self._heard[rank] <= fresh

    def _at_rest(self) -> bool:
        first, *others = self._signs
        return (
            all(self._is_fresh(rank) for rank in range(len(self._signs)))
            and first is not None
            and first.waiting_for in AT_REST
            and all(sign is not None and sign.waiting_for == "rank 0" for sign in others)
        )

    def _debugged(self) -> bool:
        return any(_is_traced(pid) for rank in range(len(self._signs)) if (pid := self._pid(rank)) is not None)


def in_start(error: EngineLost) -> EngineLost:
    """The same verdict on ranks that do not serve yet, with what to do about it."""
    sentence = f"{error}, in the start; see what holds it up, or raise --start-timeout if it only takes long"
    return EngineLost(sentence, rank=error.rank)


def _is_traced(pid: int) -> bool:
    """Whether a debugger holds the process; False where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in status.splitlines())
