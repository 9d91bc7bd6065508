"""The one stream of messages that every rank sees in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import zmq

from tokenspeed.runtime.distributed.channel import Channel
from tokenspeed.runtime.engine.agreement import StepDigest
from tokenspeed.runtime.engine.directives import Directive, StreamMessage, decoder, encoder
from tokenspeed.runtime.protocol.calls import ToEngine
from tokenspeed_kernel.progress import PROGRESS


class Stream(Protocol):
    """Where a rank's messages come from."""

    def receive(self, directives: Sequence[Directive], wait_s: float | None) -> list[StreamMessage]:
        """The messages since the last call.

        Args:
            directives: rank 0's own decisions, put behind the messages of the front; peers pass none.
            wait_s: seconds to wait for the first message; 0 does not wait, None waits for ever. Peers always
                wait for rank 0, which sends one list for every call, empty or not.
        """
        ...


class FrontStream:
    """Rank 0's stream: from the front, passed on to the peers."""

    def __init__(self, channel: Channel, digest: StepDigest):
        self.channel = channel
        self.digest = digest
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def open(self) -> None:
        """Connect to the front."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.PULL)
        self._socket.linger = 0
        self._socket.connect(f"ipc://{self.channel.run_dir}/to_rank0")

    def receive(self, directives: Sequence[Directive], wait_s: float | None) -> list[StreamMessage]:
        """See `Stream.receive`."""
        messages = [*self._arrived(0 if directives else wait_s), *directives]
        if self.channel.size > 1:
            self.channel.broadcast(encoder.encode((self.digest.value, messages)))
        return messages

    def _arrived(self, wait_s: float | None) -> list[StreamMessage]:
        if wait_s != 0:
            with PROGRESS.waiting("messages"):
                self._socket.poll(None if wait_s is None else max(1, int(wait_s * 1000)))
        messages: list[StreamMessage] = []
        while self._socket.poll(0):
            messages.append(self._decoder.decode(self._socket.recv()))
        return messages


class PeerStream:
    """The stream of every other rank: what rank 0 passes on."""

    def __init__(self, channel: Channel, digest: StepDigest):
        self.channel = channel
        self.digest = digest

    def receive(self, directives: Sequence[Directive], wait_s: float | None) -> list[StreamMessage]:
        """See `Stream.receive`.

        Raises:
            RanksDiffer: this rank has not computed what rank 0 has.
        """
        digest, messages = decoder.decode(self.channel.broadcast(None))
        self.digest.check(digest, self.channel.rank)
        return messages
