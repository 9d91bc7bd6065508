"""What a rank sends to the front over the real socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import msgspec
import pytest
import zmq

from tokenspeed.runtime.engine.outbox import Outbox
from tokenspeed.runtime.protocol.message import Message
from tokenspeed.runtime.protocol.reports import Failed, Outputs, RequestOutput, ToFront
from tokenspeed.runtime.protocol.state import Loads


class FrontSocket:
    """The front's end."""

    def __init__(self, run_dir: Path) -> None:
        self.socket = zmq.Context.instance().socket(zmq.PULL)
        self.socket.bind(f"ipc://{run_dir}/from_rank0")

    def next(self) -> Message:
        assert self.socket.poll(10_000), "nothing was sent"
        message: Message = msgspec.msgpack.decode(self.socket.recv(), type=ToFront)
        return message


@pytest.fixture
def run_dir() -> Path:
    # A Unix socket's path may have about 100 characters; pytest's own folders are longer.
    return Path(mkdtemp(prefix="ts-"))


@pytest.fixture
def front(run_dir: Path) -> Iterator[FrontSocket]:
    front = FrontSocket(run_dir)
    yield front
    front.socket.close()


def test_loads_without_outputs_are_sent_once_a_change(run_dir: Path, front: FrontSocket) -> None:
    outbox = Outbox(0, run_dir)
    outbox.open()
    busy, idle = Loads(running=1), Loads()
    output = RequestOutput(request_id="a", token_ids=[1])
    outbox.outputs([], idle)
    outbox.outputs([output], busy)
    outbox.outputs([], busy)
    outbox.outputs([output], busy)
    outbox.outputs([], idle)
    outbox.failed("done", 1)
    outbox.close()
    sent = [front.next() for _ in range(4)]
    assert sent[:3] == [
        Outputs(outputs=[output], loads=busy),
        Outputs(outputs=[output], loads=busy),
        Outputs(outputs=[], loads=idle),
    ]
    assert isinstance(sent[3], Failed)


def test_only_rank_0_speaks_for_all_but_any_rank_may_fail(run_dir: Path, front: FrontSocket) -> None:
    outbox = Outbox(1, run_dir)
    outbox.open()
    outbox.outputs([RequestOutput(request_id="a", token_ids=[1])], Loads())
    outbox.failed("out of memory", 4)
    outbox.close()
    assert front.next() == Failed(rank=1, message="out of memory", exit_code=4)
