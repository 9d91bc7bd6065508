"""What the ranks tell the front. Every rank speaks; only rank 0's words on requests and calls are sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import zmq

from tokenspeed.runtime.protocol.calls import ControlCall
from tokenspeed.runtime.protocol.message import Message
from tokenspeed.runtime.protocol.reports import CallReply, Failed, Outputs, Pong, RequestOutput, StepFailed
from tokenspeed.runtime.protocol.state import Loads


class Outbox:
    """The way from one rank to the front."""

    def __init__(self, rank: int, run_dir: Path):
        self.rank = rank
        self.run_dir = run_dir
        self._encoder = msgspec.msgpack.Encoder()
        self._last_loads = Loads()

    def open(self) -> None:
        """Connect to the front."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.PUSH)
        # A last message (a failure) must reach the front although the process ends right after it.
        self._socket.linger = 2000
        self._socket.connect(f"ipc://{self.run_dir}/from_rank0")

    def close(self) -> None:
        """Send what is left, for two seconds at most."""
        self._socket.close()

    def send(self, message: Message) -> None:
        """Send a message that all ranks produce alike; the peers of rank 0 keep silent."""
        if self.rank == 0:
            self._post(message)

    def outputs(self, outputs: list[RequestOutput], loads: Loads) -> None:
        """Send what a step produced, or that the loads changed without any output; else nothing."""
        if outputs or loads != self._last_loads:
            self._last_loads = loads
            self.send(Outputs(outputs=outputs, loads=loads))

    def reply(self, call: ControlCall, body: dict[str, Any]) -> None:
        """Answer `call`."""
        self.send(CallReply(call=call.call, body=body))

    def pong(self) -> None:
        """Answer a `Ping`, as every rank does for itself."""
        self._post(Pong(rank=self.rank))

    def step_failed(self, request_ids: list[str], error: str) -> None:
        """Tell the front of a step that failed here, after which this rank cannot go on."""
        self._post(StepFailed(request_ids=request_ids, error=error))

    def failed(self, message: str, exit_code: int, *, is_victim: bool = False) -> None:
        """Tell the front that this rank cannot go on; a victim's peers left it."""
        self._post(Failed(rank=self.rank, message=message, exit_code=exit_code, is_victim=is_victim))

    def _post(self, message: Message) -> None:
        self._socket.send(self._encoder.encode(message))
