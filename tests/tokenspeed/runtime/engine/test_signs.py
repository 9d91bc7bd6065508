"""What a rank's thread tells of its main thread."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import msgspec
import pytest
import zmq

from tokenspeed.runtime.engine.signs import Signs
from tokenspeed.runtime.protocol.state import Sign
from tokenspeed_kernel.launch import launch
from tokenspeed_kernel.progress import PROGRESS


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A short path: a socket's name is bounded."""
    with tempfile.TemporaryDirectory(prefix="ts-") as directory:
        yield Path(directory)


def test_it_tells_of_marks_and_of_the_line_of_ours_where_the_main_thread_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PROGRESS, "waiting_for", None)  # ranks that were threads of other tests wrote it all at once
    signs = Signs(3, Path())
    before = signs.sign()
    PROGRESS.step("a batch")
    with PROGRESS.waiting("all_reduce"):
        during = launch("look", signs.sign)
    assert (during.rank, during.count, during.what) == (3, before.count + 2, "look")
    assert (before.waiting_for, during.waiting_for) == (None, "all_reduce")
    assert Path(during.file).name == "signs.py"  # the innermost line of ours, which tells of itself here
    assert during.function == "sign"
    assert signs.sign().waiting_for is None


def test_it_tells_of_code_that_has_no_lines_and_of_names_that_are_no_text() -> None:
    def wait(thread: threading.Thread) -> None:
        thread.start()
        thread.join()

    # Entries of the kind 15, each of which says that up to eight code units have no line.
    units = len(wait.__code__.co_code) // 2
    without = wait.__code__.replace(
        co_linetable=bytes([0xFF] * (units // 8) + [0xF8 | units % 8 - 1] * (units % 8 > 0))
    )
    namespace = {"__name__": "tokenspeed.runtime.lineless"}
    PROGRESS.step("the import of a\udcff")
    told: list[Sign] = []
    thread = threading.Thread(target=lambda: told.append(Signs(0, Path()).sign()))
    FunctionType(without, namespace)(thread)
    assert [(sign.function, sign.line) for sign in told] == [("wait", without.co_firstlineno)]
    assert told[0].what == "the import of a?"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told[0]), type=Sign) == told[0]


def test_it_goes_on_while_the_main_thread_loops(run_dir: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.bind(f"ipc://{run_dir}/signs")
    Signs(1, run_dir).start()
    heard = []
    while len(heard) < 2:
        if socket.poll(0):  # this loop lets nobody else run but when the interpreter takes turns
            heard.append(msgspec.msgpack.decode(socket.recv(), type=Sign))
    assert {sign.rank for sign in heard} == {1}
    assert all(sign.file for sign in heard)
    socket.close(linger=0)
    context.term()


def test_each_import_is_a_mark_until_there_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROGRESS, "count", 0)
    signs = Signs(0, Path())
    first = signs.sign().count
    monkeypatch.setitem(sys.modules, "a_module_that_was_imported", sys)
    assert signs.sign().count == first + 1
    monkeypatch.delitem(sys.modules, "a_module_that_was_imported")
    assert signs.sign().count == first + 1
    PROGRESS.step("a phase")
    monkeypatch.setitem(sys.modules, "a_module_that_was_imported", sys)
    monkeypatch.setitem(sys.modules, "another_one", sys)
    assert signs.sign().count == first + 2
