"""What `/health` says of a server whose ranks stand still, and of one that is only busy."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import SMALL, reloading, restored, shared
from tests.e2e.harness import HTTP, Server
from tests.waiting import PATIENCE, until

LIMIT = 5.0
"""Seconds of silence that are told. A rank on a busy machine is silent for a moment now and then."""

FLAGS = (*SMALL, "--tensor-parallel-size", "2", "--health-timeout", str(LIMIT))


@pytest.fixture(scope="module")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Server]]:
    with shared(partial(reloading, tiny_model, tmp_path_factory, "health", FLAGS)) as running:
        yield running


@pytest.fixture
def server(running: Callable[[], Server]) -> Iterator[Server]:
    yield from restored(running())


def health(server: Server) -> tuple[int, str]:
    reply = server.control("GET", "/health")
    return reply.status_code, reply.json()["message"]


def wait_for(server: Server, status: int) -> str:
    seen = [(0, "")]

    def is_there() -> bool:
        seen.append(health(server))
        return seen[-1][0] == status

    until(is_there, lambda: str(seen[-1]))
    return seen[-1][1]


def rank_pid(server: Server, rank: int) -> int:
    (pid,) = [pid for pid, command in server.processes().items() if command.endswith(f"--rank {rank}")]
    return pid


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stands_still_is_told_until_it_goes_on(server: Server, rank: int) -> None:
    assert health(server) == (200, "")
    pid = rank_pid(server, rank)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert f"rank {rank} has given no sign of life" in wait_for(server, 503)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(server, 200)
    assert server.complete("some text", max_tokens=2)["choices"]


def test_a_step_that_takes_too_long_is_told(server: Server, tmp_path: Path) -> None:
    held = tmp_path / "held"
    slow = f"while input_ids.shape[0] > 30 and __import__('os').path.exists({str(held)!r}):\n"
    slow += "            __import__('time').sleep(0.1)"
    embed = "hidden = self.embed_tokens(input_ids)"
    server.replace("tokenspeed.runtime.models.llama", embed, f"{slow}\n        {embed}")
    assert server.reload()["success"]
    held.touch()  # the warm-up of the reload has such steps too
    thread = threading.Thread(target=lambda: server.complete("a b c d " * 10, max_tokens=1))
    thread.start()
    try:
        assert "no sign of life" in wait_for(server, 503)
    finally:
        held.unlink()
        thread.join()
    wait_for(server, 200)


def test_a_reload_that_takes_its_time_is_healthy(server: Server) -> None:
    module = "tokenspeed.runtime.models.llama"
    server.edit(module, lambda source: source + f"\n\nimport time\n\ntime.sleep({LIMIT + 4})\n")
    replies = []
    thread = threading.Thread(target=lambda: replies.append(server.reload()))
    thread.start()
    seen = set()
    while thread.is_alive():
        seen.add(health(server)[0])
        time.sleep(0.2)
    thread.join()
    assert replies[0]["success"], replies
    assert seen == {200}


def test_long_prompts_and_answers_are_healthy(server: Server) -> None:
    seen = set()
    with server.busy(8) as answers:
        end = time.monotonic() + LIMIT + 1
        while time.monotonic() < end and server.metric("vllm:num_requests_running"):
            seen.add(health(server)[0])
            time.sleep(0.1)
    assert len(answers) == 8
    assert seen == {200}


def test_a_stop_while_a_pause_holds_requests_is_quick(tiny_model: Path, tmp_path: Path) -> None:
    server = Server(str(tiny_model), *SMALL, "--drain-timeout", "600", "--enable-rl", log=tmp_path / "log")
    server.start()
    assert server.control("POST", "/pause_generation", {"mode": "abort"}).status_code == 200
    replies: list[httpx.Response] = []
    body = {"model": server.served, "prompt": "held", "max_tokens": 4}
    thread = threading.Thread(
        target=lambda: replies.append(HTTP.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE))
    )
    thread.start()
    until(lambda: server.metric("vllm:num_requests_waiting"))
    assert server.stop() == 0  # and the harness waits for less than the drain timeout
    thread.join()
    assert replies[0].status_code == 503, replies[0].text
