"""Ranks that are lost: their successors go on, and nobody who waits for an answer notices."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import SMALL
from tests.e2e.harness import Server, dump
from tests.waiting import PATIENCE, until

REPLACEMENTS = "tokenspeed:rank_replacements_total"
LONG = {"max_tokens": 60, "ignore_eos": True}

REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "Tell me", **LONG},
    {"prompt": "The three", **LONG, "temperature": 0.9, "top_p": 0.8, "seed": 5, "max_tokens": 24},
    {"prompt": "a b c d", **LONG, "temperature": 1.0, "seed": 7, "n": 3},
    {"prompt": "def f(x):", **LONG, "frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    {"prompt": "Item 1", **LONG, "logprobs": 3},
    {"prompt": "Once", **LONG, "min_tokens": 50, "ignore_eos": False},
)
"""Of every kind that the sampler knows."""


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("pair")
    flags = (*SMALL, "--tensor-parallel-size", "2")
    server = Server(str(tiny_model), *flags, overlay=folder / "overlay", log=folder / "log").start()
    yield server
    server.stop()


def answers(server: Server, body: dict[str, Any]) -> list[Any]:
    """The texts and log-probabilities of a request."""
    choices = server.complete(**body)["choices"]
    return [(choice["text"], choice["finish_reason"], rounded(choice.get("logprobs"))) for choice in choices]


def rounded(logprobs: Any) -> Any:
    """The tokens and their log-probabilities, as far as they are alike in batches of all sizes."""
    if logprobs is None:
        return None
    return logprobs["tokens"], [round(value, 2) for value in logprobs["token_logprobs"]]


def stream(server: Server, body: dict[str, Any]) -> str:
    """The pieces of one streamed answer."""
    request = {"model": server.served, "temperature": 0, "stream": True, **body}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=request, timeout=PATIENCE) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


def rank_pid(server: Server, rank: int) -> int:
    (pid,) = [pid for pid, command in server.processes().items() if command.endswith(f"--rank {rank}")]
    return pid


def wait(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(timeout=PATIENCE) for future in futures]


def test_answers_are_what_they_would_have_been(pair: Server) -> None:
    expected = [answers(pair, body) for body in REQUESTS]
    streamed = stream(pair, {"prompt": "Tell me", **LONG})
    for victim in (0, 1):
        before = pair.metric(REPLACEMENTS)
        with ThreadPoolExecutor(32) as pool:
            asked = [pool.submit(answers, pair, body) for body in (*REQUESTS, *REQUESTS[:1] * 10)]
            streams = [pool.submit(stream, pair, {"prompt": "Tell me", **LONG}) for _ in range(2)]
            pair.wait_for_running(3)
            os.kill(rank_pid(pair, victim), signal.SIGKILL)
            assert wait(asked) == [*expected, *expected[:1] * 10]
            assert wait(streams) == [streamed] * 2
        until(lambda before=before: pair.metric(REPLACEMENTS) == before + 1)
        assert f"rank {victim} ended with signal SIGKILL" in pair.output(), dump(pair.output())
    assert pair.blocks_in_use() == 0
