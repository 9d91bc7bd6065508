"""A small server under rough treatment: too many requests, callers that leave, control calls in any order, signals."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.harness import HTTP, Server
from tests.waiting import PATIENCE, until

LIMITS = ("--max-num-seqs", "16", "--max-total-tokens", "512", "--max-model-len", "256", "--drain-timeout", "2")
PROMPTS = [f"Item {number} of the list" for number in range(8)]


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose KV cache holds four of the requests below."""
    folder = tmp_path_factory.mktemp("robust")
    server = Server(str(tiny_model), *LIMITS, overlay=folder / "overlay", log=folder / "log")
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def alone(server: Server) -> dict[str, str]:
    """The answer to each prompt when nothing else runs."""
    return {prompt: server.text(prompt, max_tokens=100, ignore_eos=True) for prompt in PROMPTS}


def stream(server: Server, prompt: str, lines: int) -> None:
    """Read some lines of a streamed answer, then go away."""
    body = {"model": server.served, "prompt": prompt, "max_tokens": 100, "ignore_eos": True, "stream": True}
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as reply:
        for _line in zip(range(lines), reply.iter_lines(), strict=False):
            pass


def test_more_requests_than_the_cache_holds_get_the_same_answers(server: Server, alone: dict[str, str]) -> None:
    asked = [random.Random(number).choice(PROMPTS) for number in range(24)]
    assert server.control("POST", "/pause_generation").json()["success"]
    with ThreadPoolExecutor(24) as pool:
        answers = pool.map(lambda prompt: server.text(prompt, max_tokens=100, ignore_eos=True), asked)
        until(lambda: server.metric("vllm:num_requests_waiting") == 24)
        assert server.control("POST", "/continue_generation").json()["success"]
    assert list(answers) == [alone[prompt] for prompt in asked]
    assert server.control("GET", "/server_info").json()["loads"]["preemptions"] > 0
    assert server.blocks_in_use() == 0


def test_callers_that_leave_at_any_moment_leave_nothing(server: Server) -> None:
    server.control("POST", "/pause_generation")
    held = {"model": server.served, "prompt": "held", "max_tokens": 100}
    with pytest.raises(httpx.ReadTimeout):
        HTTP.post(f"{server.url}/v1/completions", json=held, timeout=httpx.Timeout(PATIENCE, read=0.3))
    server.control("POST", "/continue_generation")
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda number: stream(server, PROMPTS[number % 8], number % 5), range(24)))
    assert server.blocks_in_use() == 0
    assert server.control("GET", "/server_info").json()["loads"]["waiting"] == 0


def test_control_calls_in_any_order_are_all_answered_and_no_request_is_lost(
    server: Server, alone: dict[str, str]
) -> None:
    done = threading.Event()
    odd: list[Any] = []

    def ask(seed: int) -> None:
        choose = random.Random(seed)
        while not done.is_set():
            prompt = choose.choice(PROMPTS)
            choice = server.complete(prompt, max_tokens=30, ignore_eos=True)["choices"][0]
            if not alone[prompt].startswith(choice["text"]) or choice["finish_reason"] not in ("length", "abort"):
                odd.append(choice)

    def control(seed: int) -> None:
        choose = random.Random(seed)
        for number in range(14):
            reload = {"id": f"{seed}-{number}", "modules": ["tokenspeed.runtime.layers.activation"], "timeout_s": 5}
            path, body = choose.choice(
                [
                    ("/pause_generation", {"mode": choose.choice(["wait", "abort"])}),
                    ("/continue_generation", None),
                    ("/flush_cache", None),
                    ("/reload_forward", reload | {"mode": choose.choice(["wait", "abort"])}),
                ]
            )
            reply = server.control("POST", path, body)
            if reply.status_code != 200 and reply.json().get("code") not in ("cancelled", "timeout", None):
                odd.append((path, reply.text))

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, seed) for seed in range(4)]
        controlling = [pool.submit(control, seed) for seed in range(4)]
        while not all(call.done() for call in controlling):
            server.control("POST", "/continue_generation")
            time.sleep(0.1)
        done.set()
        server.control("POST", "/continue_generation")
        for call in [*asking, *controlling]:
            call.result()
    assert odd == []
    assert server.blocks_in_use() == 0
    assert server.reload_status()["state"] == "idle"
    loads = server.control("GET", "/server_info").json()["loads"]
    assert (loads["paused"], loads["waiting"], loads["running"]) == (False, 0, 0)


def test_a_rank_that_stands_still_for_a_while_loses_nothing(server: Server, alone: dict[str, str]) -> None:
    rank = next(pid for pid, line in server.processes().items() if "tokenspeed.rank" in line)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.text, PROMPTS[0], max_tokens=100, ignore_eos=True)
        time.sleep(0.1)  # so that it usually runs
        os.kill(rank, signal.SIGSTOP)
        try:
            assert server.control("GET", "/health").status_code == 200
        finally:
            os.kill(rank, signal.SIGCONT)
        assert answer.result() == alone[PROMPTS[0]]


def test_a_stop_while_requests_are_held_ends_at_the_drain_timeout(server: Server) -> None:
    """Last: it ends the server."""
    server.control("POST", "/pause_generation")
    body = {"model": server.served, "prompt": "held", "max_tokens": 5}
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(HTTP.post, f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
        until(lambda: server.metric("vllm:num_requests_waiting"))
        assert server.stop() == 0
        assert held.result().status_code == 503
        assert "stopped before" in json.loads(held.result().text)["error"]["message"]
