"""What rank 0 and its peers say to each other besides tensors: the stream of messages, sources, and votes.

It runs over ZMQ and never over a collective, because a peer that is blocked in a collective cannot be freed
from outside, whereas a missing answer here is noticed at a deadline.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tokenspeed.errors import TokenSpeedError

VERDICT_GRACE_S = 5.0
"""Seconds beyond the deadline of a vote that the peers wait for the verdict, so that rank 0 names who is silent."""


class RankLost(TokenSpeedError):
    """A rank did not answer before the deadline."""


class Ballot(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank fared in one phase."""

    rank: int
    seconds: float = 0.0
    """Time the phase took on this rank."""
    error: dict[str, Any] | None = None
    """What went wrong, as `tokenspeed.runtime.reload.fault.describe` tells it; None when nothing did."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks together found; every rank gets the same one."""

    ballots: list[Ballot]

    @property
    def failed(self) -> Ballot | None:
        """The failure of the lowest rank that has one."""
        return next((ballot for ballot in self.ballots if ballot.error is not None), None)

    @property
    def seconds(self) -> float:
        """Time of the slowest rank."""
        return max(ballot.seconds for ballot in self.ballots)


class Channel:
    """A star of ZMQ pairs with rank 0 in the middle; with one rank it carries nothing."""

    def __init__(self, rank: int, size: int, run_dir: Path):
        self.rank = rank
        self.size = size
        self.run_dir = run_dir
        self._peers: list[zmq.Socket[bytes]] = []

    def open(self) -> None:
        """Bind on rank 0, connect on the others."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        peers = range(1, self.size) if self.rank == 0 else [self.rank]
        for peer in peers:
            socket = context.socket(zmq.PAIR)
            # The last message is mostly `Stop`, and rank 0 closes right after it.
            socket.linger = 2000
            address = f"ipc://{self.run_dir}/rank{peer}"
            if self.rank == 0:
                socket.bind(address)
            else:
                socket.connect(address)
            self._peers.append(socket)

    def close(self) -> None:
        """Send what is left, for two seconds at most."""
        for socket in self._peers:
            socket.close()
        self._peers.clear()

    def broadcast(self, payload: bytes | None) -> bytes:
        """Give rank 0's `payload` to every rank; the others pass None and wait for it."""
        if self.rank != 0:
            return self._peers[0].recv()
        if payload is None:
            raise ValueError("rank 0 must bring the payload")
        for socket in self._peers:
            socket.send(payload)
        return payload

    def exchange(self, payload: bytes) -> list[bytes]:
        """Give every rank's `payload` to every rank, in rank order; waits for the slowest."""
        if self.rank != 0:
            self._peers[0].send(payload)
            return msgspec.msgpack.decode(self.broadcast(None), type=list[bytes])
        payloads = [payload, *(socket.recv() for socket in self._peers)]
        self.broadcast(msgspec.msgpack.encode(payloads))
        return payloads

    def vote(self, ballot: Ballot, deadline_s: float) -> Verdict:
        """Collect one ballot a rank on rank 0 and give all of them to every rank.

        Args:
            ballot: of this rank.
            deadline_s: seconds that rank 0 waits for all ballots; the others wait a little longer for the verdict.

        Raises:
            RankLost: when a rank is silent for so long.
        """
        if self.rank != 0:
            self._peers[0].send(msgspec.msgpack.encode(ballot))
            return msgspec.msgpack.decode(self._receive(0, deadline_s + VERDICT_GRACE_S), type=Verdict)
        deadline = time.monotonic() + deadline_s
        ballots = [ballot]
        for index in range(len(self._peers)):
            answer = self._receive(index, deadline - time.monotonic())
            ballots.append(msgspec.msgpack.decode(answer, type=Ballot))
        verdict = Verdict(ballots=ballots)
        self.broadcast(msgspec.msgpack.encode(verdict))
        return verdict

    def _receive(self, index: int, seconds: float) -> bytes:
        socket = self._peers[index]
        if not socket.poll(max(0, int(seconds * 1000))):
            silent = 0 if self.rank != 0 else index + 1
            raise RankLost(f"rank {silent} did not answer rank {self.rank} in time; restart the server")
        return socket.recv()
