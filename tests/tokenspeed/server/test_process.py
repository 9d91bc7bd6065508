"""The front as a process: how it starts, drains, fails and ends, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import psutil
import pytest
import zmq
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as rpc

from tests.waiting import PATIENCE, until
from tokenspeed.runtime.config import (
    Config,
    ControlOptions,
    ModelOptions,
    ParallelOptions,
    ServeOptions,
)
from tokenspeed.server.process import unexpected

Start = Callable[..., Any]
MODEL = ModelOptions(model="echo")


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ready_with_two_ranks(start_front: Start, eventually: Callable[..., Any], **behaviour: Any) -> Any:
    front = start_front(Config(model=MODEL, parallel=ParallelOptions(tensor_parallel_size=2)), **behaviour)
    front.until_ready()
    eventually(lambda: (front.run_dir / "rank1.pid").exists() and (front.run_dir / "rank1.pid").read_text())
    return front


def test_it_reports_its_start_and_ends_in_order(start_front: Start, eventually: Callable[..., Any]) -> None:
    front = ready_with_two_ranks(start_front, eventually)
    kinds = [event["event"] for event in front.events]
    assert kinds == ["starting", "starting", "ready"]
    assert front.events[1] == {"event": "starting", "phase": "load", "detail": "weights"}
    assert front.events[-1]["info"]["vocab_size"] == 260
    pids = [front.rank_pid(rank) for rank in (0, 1)]
    assert front.stop() == 0
    assert all(gone(pid) for pid in pids)
    assert len(front.received("Stop")) == 1
    assert "Traceback" not in front.log()


async def test_a_stop_lets_running_requests_finish_and_admits_no_more(
    start_front: Start, generate_request: Callable[..., Any]
) -> None:
    front = start_front(Config(model=MODEL, serve=ServeOptions(drain_timeout=600.0)), free_steps=1).until_ready()
    async with front.channel() as channel:
        scheduler = rpc.TokenSpeedSchedulerStub(channel)
        request = generate_request("hello", stream=True, ignore_eos=True, max_new_tokens=60)
        running = aiter(scheduler.Generate(request))
        await anext(running)
        front.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError, match="stopping") as caught:
            while True:
                call = scheduler.Generate(generate_request("a"))
                with suppress(TimeoutError):
                    await asyncio.wait_for(call.read(), 0.1)
                call.cancel()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        front.let_go()
        responses = [response async for response in running]
        assert len(responses[-1].complete.output_ids) == 60
    assert await asyncio.to_thread(front.process.wait, PATIENCE) == 0


@pytest.mark.parametrize("again", [True, False])
async def test_a_drain_ends_at_its_timeout_or_at_a_second_signal(
    start_front: Start, generate_request: Callable[..., Any], again: bool
) -> None:
    timeout = 600.0 if again else 0.1
    front = start_front(Config(model=MODEL, serve=ServeOptions(drain_timeout=timeout)), step_seconds=0.5)
    front.until_ready()
    async with front.channel() as channel:
        request = generate_request("hello", stream=True, ignore_eos=True)
        call = aiter(rpc.TokenSpeedSchedulerStub(channel).Generate(request))
        await anext(call)
        front.process.send_signal(signal.SIGINT)
        if again:
            async with httpx.AsyncClient(base_url=front.control_url, timeout=PATIENCE) as control:
                while (await control.get("/health")).status_code == 200:
                    pass
            front.process.send_signal(signal.SIGINT)
        with pytest.raises(grpc.aio.AioRpcError, match="stopped before") as caught:
            async for _ in call:
                pass
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert await asyncio.to_thread(front.process.wait, PATIENCE) == 0


@pytest.mark.parametrize(
    ("start", "message", "code"),
    [
        ("failed", "the weights are damaged; download them again", 3),
        ("7", "rank 0 ended with exit code 7; see its messages above", 1),
        ("0", "rank 0 ended with exit code 0; see its messages above", 1),
    ],
)
def test_a_rank_that_cannot_start_ends_the_front_with_its_sentence(
    start_front: Start, start: str, message: str, code: int
) -> None:
    front = start_front(Config(model=MODEL), start=start)
    assert front.wait_for("failed") == {"event": "failed", "message": message, "exit_code": code}
    assert front.process.wait(PATIENCE) == code
    assert message not in front.log()  # the parent prints it


def test_a_start_that_stands_still_is_given_up(start_front: Start) -> None:
    config = Config(model=MODEL, serve=ServeOptions(start_timeout=1.0))
    front = start_front(config, start="never")
    failed = front.wait_for("failed")
    assert "rank 0 has given no sign of life for 1 s, in the start" in failed["message"]
    assert front.process.wait(PATIENCE) == failed["exit_code"] == 1


def test_a_damaged_tokenizer_is_one_sentence(start_front: Start, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    front = start_front(Config(model=MODEL), tokenizer_path=str(tmp_path))
    failed = front.wait_for("failed")
    assert failed["message"].startswith(f"{tmp_path}/tokenizer.json cannot be read (")
    assert front.process.wait(PATIENCE) == failed["exit_code"] == 3


def test_a_tokenizer_of_another_form_is_no_failure(start_front: Start, tmp_path: Path) -> None:
    front = start_front(Config(model=MODEL), tokenizer_path=str(tmp_path)).until_ready()
    assert front.stop() == 0


def test_an_unexpected_exception_is_one_sentence_and_a_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    try:
        {}["no such key"]
    except KeyError as error:
        told = unexpected(error)
    assert (str(told), told.exit_code) == ("the front failed: KeyError: 'no such key'; its traceback is above", 1)
    assert "Traceback" in caplog.text


def test_a_message_that_is_none_costs_the_ranks_and_not_the_front(start_front: Start) -> None:
    front = start_front(Config(model=MODEL)).until_ready()
    first = front.rank_pid(0)
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(f"ipc://{front.run_dir}/0/from_rank0")
        socket.send(b"no message of ours")
        until(lambda: "the ranks were replaced" in front.log(), front.log)
    assert front.rank_pid(0) != first
    assert front.stop() == 0


def test_a_configuration_that_cannot_be_read_is_a_failed_event_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}]")
    command = [sys.executable, "-m", "tokenspeed.server", "--run-dir", str(tmp_path), "--status-fd", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert json.loads(result.stdout)["event"] == "failed"
    assert result.returncode == 1


def test_a_stop_during_the_start_is_obeyed(start_front: Start) -> None:
    front = start_front(Config(model=MODEL), start="never").until_listening()
    assert front.wait_for("starting")["phase"] == "load"
    pid = front.rank_pid(0)
    assert front.stop() == 0
    assert gone(pid)


def test_no_rank_outlives_a_killed_front(start_front: Start, eventually: Callable[..., Any]) -> None:
    front = ready_with_two_ranks(start_front, eventually)
    pids = [front.rank_pid(rank) for rank in (0, 1)]
    front.process.kill()
    front.process.wait()
    assert eventually(lambda: all(gone(pid) for pid in pids))


def test_the_front_ends_when_its_parent_dies(start_front: Start, eventually: Callable[..., Any]) -> None:
    front = ready_with_two_ranks(start_front, eventually)
    pids = [front.rank_pid(rank) for rank in (0, 1)]
    front.status.close()
    assert front.process.wait(PATIENCE) == 0
    assert all(gone(pid) for pid in pids)


def test_a_control_port_in_use_is_one_sentence(start_front: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        front = start_front(Config(model=MODEL, control=ControlOptions(rl_control_port=port)))
        failed = front.wait_for("failed")
    assert f"127.0.0.1:{port} cannot be used" in failed["message"]
    assert "--rl-control-port" in failed["message"]
    assert front.process.wait(PATIENCE) == failed["exit_code"] == 4
    assert not (front.run_dir / "rank0.pid").exists()


def test_a_run_directory_too_long_for_a_socket_is_one_sentence(tmp_path: Path) -> None:
    run_dir = tmp_path / ("d" * 120)
    run_dir.mkdir()
    (run_dir / "config.json").write_bytes(msgspec.json.encode(Config(model=MODEL)))
    result = subprocess.run(
        [sys.executable, "-m", "tokenspeed.server", "--run-dir", str(run_dir), "--status-fd", "1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    *_, line = result.stdout.splitlines()
    assert json.loads(line)["event"] == "failed"
    assert "TMPDIR" in json.loads(line)["message"]
    assert result.returncode == 4


def test_the_front_never_imports_torch() -> None:
    code = "import sys, tokenspeed.server.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE).returncode == 0
