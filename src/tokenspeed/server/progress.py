"""Whether the ranks are at work: what stands still must not look healthy."""

from __future__ import annotations

import time
from collections.abc import Callable

from tokenspeed.server.errors import EngineUnavailable

PINGS_IN_PATIENCE = 4
"""Signs of life that a rank is asked for in the time after which its silence is noticed."""

BUSY_FACTOR = 10
"""How much longer a rank may be silent while it reloads or writes a profile, when it answers nobody."""


class Progress:
    """When each rank was last heard of, against when it was asked for a sign of life.

    `patience` is in seconds. `busy` says whether the ranks do something that takes its time. A silent rank counts
    from the first question that it has not answered, so that one who is asked nothing need not say anything.
    """

    def __init__(
        self,
        size: int,
        patience: float,
        busy: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.patience = patience
        self._busy = busy
        self._clock = clock
        self._asked: list[float | None] = [None] * size
        self._heard = clock()

    @property
    def interval(self) -> float:
        """Seconds between two questions."""
        return self.patience / PINGS_IN_PATIENCE

    @property
    def silence(self) -> float:
        """Seconds since rank 0, which speaks at every step, was heard of."""
        return self._clock() - self._heard

    def begin_again(self) -> None:
        """Other ranks are there, which have been asked nothing."""
        self._asked = [None] * len(self._asked)
        self._heard = self._clock()

    def asked(self) -> None:
        """All ranks are asked for a sign of life now."""
        now = self._clock()
        self._asked = [now if asked is None else asked for asked in self._asked]

    def heard(self, rank: int = 0) -> None:
        """A rank has given one."""
        self._asked[rank] = None
        if rank == 0:
            self._heard = self._clock()

    def check(self) -> None:
        """Refuse to call the engine healthy while a rank stands still.

        Raises:
            EngineUnavailable: with the rank and how long it is silent.
        """
        patience = self.patience * (BUSY_FACTOR if self._busy() else 1)
        now = self._clock()
        for rank, asked in enumerate(self._asked):
            if asked is not None and now - asked > patience:
                raise EngineUnavailable(
                    f"rank {rank} has given no sign of life for {now - asked:.0f} s; "
                    "the ranks are replaced after --step-timeout"
                )
