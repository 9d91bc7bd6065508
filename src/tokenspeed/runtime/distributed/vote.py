"""How the ranks fare in one phase: told at once, and agreed on at its end."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import msgspec

from tokenspeed.runtime.distributed.channel import Channel
from tokenspeed.runtime.distributed.errors import CollectiveMismatch, PeerFailed, RankLost
from tokenspeed_kernel.progress import PROGRESS

VERDICT_GRACE_S = 5.0
"""Seconds beyond the deadline of a vote that the peers wait for the verdict, so that rank 0 names who is silent."""


class Ballot(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank fared in one phase."""

    rank: int
    seconds: float = 0.0
    """Time the phase took on this rank."""
    error: dict[str, Any] | None = None
    """What went wrong, as `tokenspeed.runtime.reload.fault.describe` tells it; None when nothing did."""
    is_victim: bool = False
    """Whether the error only follows from a fault of another rank."""
    culprit: int | None = None
    """That other rank, where it is known."""
    collectives: int | None = None
    """Collectives that the rank called in the phase; None where nobody counts."""
    calls: int | None = None
    """Checksum of what these were."""
    like_before: bool = False
    """Whether these are just what the serving code calls."""
    checksum: int | None = None
    """Of what every rank computes alike; None where there is nothing such."""
    recapture: str | None = None
    """Why captured steps of the rank cannot take the edited code as they are; None where nothing speaks against it."""
    device_lost: bool = False
    """Whether what went wrong cost the rank its device, so that the ranks have to be replaced."""


class Report(msgspec.Struct, frozen=True, tag=True):
    """A ballot that rank 0 passes on while others are still in the phase."""

    ballot: Ballot


class Verdict(msgspec.Struct, frozen=True, tag=True):
    """What all ranks together found, by rank; every rank gets the same one."""

    ballots: list[Ballot]

    @property
    def failed(self) -> Ballot | None:
        """The failure that the others follow from; the lowest rank's where several failed for themselves."""
        failures = [ballot for ballot in self.ballots if ballot.error is not None]
        return min(failures, key=lambda ballot: (ballot.is_victim, ballot.rank), default=None)

    @property
    def device_lost(self) -> bool:
        """Whether some rank's device is lost."""
        return any(ballot.device_lost for ballot in self.ballots)

    @property
    def odd(self) -> int | None:
        """The rank that computed what few others did, by its checksum; the last of several such, None without one."""
        return _odd([ballot.checksum for ballot in self.ballots])

    @property
    def out_of_step(self) -> int | None:
        """The same for the collectives that the ranks called."""
        return _odd([ballot.calls for ballot in self.ballots])

    @property
    def recapture(self) -> str | None:
        """Why steps have to be captured anew, on all ranks where one of them says so."""
        return next((ballot.recapture for ballot in self.ballots if ballot.recapture is not None), None)

    @property
    def seconds(self) -> float:
        """Time of the slowest rank."""
        return max(ballot.seconds for ballot in self.ballots)


def _odd(values: list[int | None]) -> int | None:
    often = Counter(values)
    if len(often) == 1:
        return None
    return max(range(len(values)), key=lambda rank: (-often[values[rank]], rank))


_FROM_RANK_0: msgspec.msgpack.Decoder[Report | Verdict] = msgspec.msgpack.Decoder(Report | Verdict)
_FROM_PEER = msgspec.msgpack.Decoder(Ballot)


class Vote:
    """One phase on this rank: `attend` while its work goes on, `cast` once at its end.

    Every rank opens its votes in the same order. Rank 0 passes on what each rank reports, so that one which waits for
    another in a collective learns that it waits in vain. A rank that computes is left to it: code that fails on every
    rank then fails on each for itself, and the lowest one is named.
    """

    def __init__(self, channel: Channel):
        self._channel = channel
        self._ballots: dict[int, Ballot] = {}
        self._verdict: Verdict | None = None
        # A thread that watches over this one may attend as well.
        self._attending = threading.Lock()

    def attend(self, collectives: int, like_before: bool) -> None:
        """Hear what other ranks report, while this one waits for them in a collective.

        Args:
            collectives: how many this rank has called in the phase, this one included.
            like_before: whether they are those of the serving code so far.

        Raises:
            PeerFailed: another rank has failed.
            CollectiveMismatch: another rank has ended the phase and will not come.
        """
        with self._attending:
            for source in self._channel.ready(0):
                self._take(source)
        for ballot in self._ballots.values():
            if ballot.error is not None:
                raise PeerFailed(ballot.rank, str(ballot.error.get("error")))
        for ballot in self._ballots.values():
            if ballot.collectives is not None and ballot.collectives < collectives:
                mine = self._channel.rank
                raise CollectiveMismatch(
                    f"rank {ballot.rank} ended the phase after {ballot.collectives} collective(s), while rank {mine} "
                    f"waits for it in number {collectives}; every rank must call the same ones in the same order",
                    culprit=mine if ballot.like_before and not like_before else ballot.rank,
                )

    def cast(self, ballot: Ballot, deadline_s: float | None = None) -> Verdict:
        """Tell how this rank fared, at once, and wait for all others.

        Args:
            ballot: of this rank.
            deadline_s: seconds that rank 0 waits for all ballots, and the others a little longer for the verdict;
                None waits for ever, where somebody else watches that the ranks go on.

        Raises:
            RankLost: when a rank is silent for so long.
        """
        channel = self._channel
        self._ballots[channel.rank] = ballot
        with PROGRESS.waiting("vote"):
            if channel.rank == 0:
                return self._collect(ballot, deadline_s)
            channel.send(0, msgspec.msgpack.encode(ballot))
            deadline = None if deadline_s is None else time.monotonic() + deadline_s + VERDICT_GRACE_S
            while self._verdict is None:
                self._take_next(deadline, [0])
            return self._verdict

    def _collect(self, ballot: Ballot, deadline_s: float | None) -> Verdict:
        channel = self._channel
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self._pass_on(ballot)
        while len(self._ballots) < channel.size:
            self._take_next(deadline, [rank for rank in range(channel.size) if rank not in self._ballots])
        verdict = Verdict(ballots=[self._ballots[rank] for rank in range(channel.size)])
        for rank in range(1, channel.size):
            channel.send(rank, msgspec.msgpack.encode(verdict))
        return verdict

    def _take_next(self, deadline: float | None, silent: list[int]) -> None:
        sources = self._channel.ready(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not sources:
            raise RankLost(f"rank {silent[0]} did not answer rank {self._channel.rank} in time")
        for source in sources:
            self._take(source)

    def _take(self, source: int) -> None:
        data = self._channel.receive(source)
        if self._channel.rank == 0:
            ballot = _FROM_PEER.decode(data)
            self._ballots[ballot.rank] = ballot
            self._pass_on(ballot)
            return
        message = _FROM_RANK_0.decode(data)
        if isinstance(message, Verdict):
            self._verdict = message
        else:
            self._ballots[message.ballot.rank] = message.ballot

    def _pass_on(self, ballot: Ballot) -> None:
        report = msgspec.msgpack.encode(Report(ballot))
        for rank in range(1, self._channel.size):
            if rank not in self._ballots:
                self._channel.send(rank, report)
