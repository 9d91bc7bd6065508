"""What rank 0 and its peers say to each other besides tensors: the stream of messages, sources, and votes.

It runs over ZMQ and never over a collective, because a peer that is blocked in a collective cannot be freed
from outside, whereas a missing answer here is noticed at a deadline.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import zmq

from tokenspeed_kernel.progress import PROGRESS


class Channel:
    """A star of ZMQ pairs with rank 0 in the middle; with one rank it carries nothing."""

    def __init__(self, rank: int, size: int, run_dir: Path):
        self.rank = rank
        self.size = size
        self.run_dir = run_dir
        self._peers: dict[int, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()

    def open(self) -> None:
        """Bind on rank 0, connect on the others."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        for peer in range(1, self.size) if self.rank == 0 else [0]:
            socket = context.socket(zmq.PAIR)
            # The last message is mostly `Stop`, and rank 0 closes right after it.
            socket.linger = 2000
            address = f"ipc://{self.run_dir}/rank{max(peer, self.rank)}"
            if self.rank == 0:
                socket.bind(address)
            else:
                socket.connect(address)
            self._poller.register(socket, zmq.POLLIN)
            self._peers[peer] = socket

    def close(self) -> None:
        """Send what is left, for two seconds at most."""
        for socket in self._peers.values():
            self._poller.unregister(socket)
            socket.close()
        self._peers.clear()

    def broadcast(self, payload: bytes | None) -> bytes:
        """Give rank 0's `payload` to every rank; the others pass None and wait for it."""
        if self.rank != 0:
            with PROGRESS.waiting("rank 0"):
                return self._peers[0].recv()
        if payload is None:
            raise ValueError("rank 0 must bring the payload")
        for socket in self._peers.values():
            socket.send(payload)
        return payload

    def exchange(self, payload: bytes) -> list[bytes]:
        """Give every rank's `payload` to every rank, in rank order; waits for the slowest."""
        if self.rank != 0:
            self.send(0, payload)
            return msgspec.msgpack.decode(self.broadcast(None), type=list[bytes])
        with PROGRESS.waiting("other ranks"):
            payloads = [payload, *(socket.recv() for socket in self._peers.values())]
        self.broadcast(msgspec.msgpack.encode(payloads))
        return payloads

    def send(self, rank: int, payload: bytes) -> None:
        """Send to one rank: rank 0 to any other, the others to rank 0 only."""
        self._peers[rank].send(payload)

    def receive(self, rank: int) -> bytes:
        """The next message of a rank; waits for it."""
        return self._peers[rank].recv()

    def ready(self, seconds: float | None) -> list[int]:
        """The ranks of which a message has come; waits up to `seconds` for the first, None for ever."""
        if not self._peers:
            return []
        found = {socket for socket, _ in self._poller.poll(None if seconds is None else int(seconds * 1000))}
        return [rank for rank, socket in self._peers.items() if socket in found]
