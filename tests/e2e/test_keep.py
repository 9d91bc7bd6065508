"""Requests that run while a reload comes: they go on, and whoever reads them gets no token twice and none too few."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.answers import answers, stream
from tests.e2e.conftest import restored
from tests.e2e.harness import HTTP, Server, dump
from tests.waiting import PATIENCE, until

LLAMA = "tokenspeed.runtime.models.llama"
NORM = "tokenspeed_kernel.ops.norm.reference"
SAMPLER = "tokenspeed.runtime.sampling.sampler"
MLP_RESULT = "return self.mlp(hidden), residual"
SAMPLE = "if batch.bias is not None:"
REPLACEMENTS = "tokenspeed:rank_replacements_total"

LONG: dict[str, Any] = {"max_tokens": 90, "ignore_eos": True}
GREEDY: dict[str, Any] = {"prompt": "Tell me", **LONG}
REQUESTS: tuple[dict[str, Any], ...] = (
    GREEDY,
    {"prompt": "The three", **LONG, "temperature": 0.9, "top_p": 0.8, "seed": 5},
    {"prompt": "a b c d " * 40, **LONG, "temperature": 1.0, "seed": 7, "n": 3},
    {"prompt": "def f(x):", **LONG, "frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    {"prompt": "Item 1", **LONG, "logprobs": 3},
    {"prompt": "Once", **LONG, "min_tokens": 80, "ignore_eos": False},
    {"prompt": "Yes or no?", "max_tokens": 400, "regex": "((yes|no), ){30}end", "temperature": 1.0, "seed": 3},
)
"""Of every kind that the sampler knows."""


@pytest.fixture(params=["graphs", "two-ranks"])
def server(request: pytest.FixtureRequest, tiny_server: Callable[[str], Server]) -> Iterator[Server]:
    yield from restored(tiny_server(request.param))


ON_GRAPHS = pytest.mark.parametrize("server", ["graphs"], indirect=True)
ON_TWO_RANKS = pytest.mark.parametrize("server", ["two-ranks"], indirect=True)


@pytest.fixture
def slow(server: Server, tmp_path: Path) -> Path:
    """A file that makes every step take 50 ms or more while it exists; it does not yet."""
    flag = tmp_path / "slow"
    wait = f"import pathlib, time\n        if pathlib.Path({str(flag)!r}).exists():\n            time.sleep(0.05)\n"
    server.replace(SAMPLER, SAMPLE, f"{wait}        {SAMPLE}")
    assert server.reload()["success"]
    return flag


@contextmanager
def running(server: Server, slow: Path, bodies: list[dict[str, Any]], answer: Callable[..., Any]) -> Iterator[Any]:
    """Futures of the answers to `bodies`, all of which run within the block."""
    slow.touch()
    with ThreadPoolExecutor(len(bodies)) as pool:
        try:
            asked = [pool.submit(answer, server, body) for body in bodies]
            count = sum(body.get("n", 1) for body in bodies)
            enough = lambda: server.metric("vllm:num_requests_running") >= count  # noqa: E731
            until(lambda: enough() or any(future.done() for future in asked), server.stacks)
            yield asked
        finally:
            slow.unlink(missing_ok=True)


def either(server: Server, body: dict[str, Any]) -> Any:
    return (
        stream(server, {k: v for k, v in body.items() if k != "stream"}) if "stream" in body else answers(server, body)
    )


def wait(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(timeout=PATIENCE) for future in futures]


def kept(reply: dict[str, Any]) -> int:
    """How many requests a reload says that it kept."""
    (note,) = [note for note in reply["notes"] if "running request(s) were kept" in note]
    return int(note.split()[0])


def test_answers_are_what_they_would_have_been(server: Server, slow: Path) -> None:
    text = server.text(**GREEDY)
    bodies: list[dict[str, Any]] = [
        *REQUESTS,
        {**GREEDY, "stream": True},
        {**GREEDY, "stop": [text[-30:-24]]},
    ]
    expected = [either(server, body) for body in bodies]
    assert len(expected[-1][0][0]) < len(text)
    with running(server, slow, bodies, either) as asked:
        server.replace(LLAMA, MLP_RESULT, "return self.mlp(hidden)[:, :5], residual")
        broken = server.reload(mode="keep")
        assert (broken["success"], broken["phase"]) == (False, "warm"), dump(broken)
        server.revert(LLAMA)
        server.edit(NORM, lambda text: text + "\n\nSCALE = 1\n")
        reply = server.reload(mode="keep")
        assert reply["success"], dump(reply)
        assert kept(reply) > 3 and reply["seconds"]["held"] > 0
        slow.unlink()
        assert wait(asked) == expected
    assert server.blocks_in_use() == 0


@ON_GRAPHS
def test_the_new_code_goes_on_where_the_old_one_stopped(server: Server, slow: Path) -> None:
    old = server.text(**GREEDY)
    with running(server, slow, [GREEDY] * 3, answers) as asked:
        server.replace(LLAMA, MLP_RESULT, "return self.mlp(hidden) * -0.7, residual")
        reply = server.reload(mode="keep")
        assert reply["success"], dump(reply)
        slow.unlink()
        texts = [answer[0][0] for answer in wait(asked)]
    new = server.text(**GREEDY)
    for text in texts:
        assert text[:4] == old[:4] and text not in (old, new), (text, old, new)


@ON_GRAPHS
def test_a_pause_that_keeps_holds_all_and_a_reload_meanwhile_keeps_too(server: Server, slow: Path) -> None:
    expected = [answers(server, body) for body in REQUESTS[:3]]
    leaves = {"model": server.served, "temperature": 0, "stream": True, **GREEDY}
    with running(server, slow, [*REQUESTS[:3], GREEDY], answers) as asked:
        with HTTP.stream("POST", f"{server.url}/v1/completions", json=leaves, timeout=PATIENCE) as reply:
            next(reply.iter_lines())
            assert server.control("POST", "/pause_generation", {"mode": "keep"}).status_code == 200
            slow.unlink()
            runs = server.metric("vllm:num_requests_running")
        # The gateway may see that the client has left, or only when there is a token for it.
        server.edit(NORM, lambda text: text + "\n\nSCALE = 1\n")
        done = server.reload(mode="wait")
        assert done["success"], dump(done)
        assert kept(done) in (runs - 1, runs)
        assert not any(future.done() for future in asked)
        assert server.control("POST", "/continue_generation").status_code == 200
        assert wait(asked)[:3] == expected
    assert server.blocks_in_use() == 0


@ON_TWO_RANKS
def test_a_rank_that_is_lost_in_a_reload_costs_none_of_what_it_keeps(server: Server, slow: Path) -> None:
    expected, before = [answers(server, body) for body in REQUESTS], server.metric(REPLACEMENTS)
    with running(server, slow, list(REQUESTS), answers) as asked:
        server.replace(LLAMA, MLP_RESULT, f"import os, signal; os.kill(os.getpid(), {int(signal.SIGKILL)})")
        reply = server.reload(mode="keep")
        assert (reply["success"], reply["code"], reply["undone"]) == (False, "failed", True), dump(reply)
        slow.unlink()
        assert wait(asked) == expected
    assert server.metric(REPLACEMENTS) == before + 1
    assert server.blocks_in_use() == 0
