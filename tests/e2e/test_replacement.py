"""Ranks that are lost: their successors go on, and nobody who waits for an answer notices."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.answers import answers, stream
from tests.e2e.conftest import SMALL, reloading, restored, shared
from tests.e2e.harness import HTTP, Server, dump
from tests.waiting import PATIENCE, until

REPLACEMENTS = "tokenspeed:rank_replacements_total"
LLAMA = "tokenspeed.runtime.models.llama"
EMBED = "hidden = self.embed_tokens(input_ids)"
OTHER = ("return self.mlp(hidden), residual", "return self.mlp(hidden) * -0.7, residual")
TIMEOUT = 15
START_TIMEOUT = 30
"""Seconds of silence, of which there are few when a module is imported on a busy machine."""

FLAGS = (
    *(*SMALL, "--tensor-parallel-size", "2", "--report-generation", "--start-timeout", str(START_TIMEOUT)),
    *("--reload-rank-timeout", str(TIMEOUT), "--step-timeout", str(TIMEOUT)),
)
LONG = {"max_tokens": 60, "ignore_eos": True}

REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "Tell me", **LONG},
    {"prompt": "The three", **LONG, "temperature": 0.9, "top_p": 0.8, "seed": 5, "max_tokens": 24},
    {"prompt": "a b c d", **LONG, "temperature": 1.0, "seed": 7, "n": 3},
    {"prompt": "def f(x):", **LONG, "frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    {"prompt": "Item 1", **LONG, "logprobs": 3},
    {"prompt": "Once", **LONG, "min_tokens": 50, "ignore_eos": False},
    {"prompt": "Yes or no?", "max_tokens": 200, "regex": "((yes|no), ){20}end", "temperature": 1.0, "seed": 3},
)
"""Of every kind that the sampler knows."""


@pytest.fixture(scope="module")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Server]]:
    with shared(partial(reloading, tiny_model, tmp_path_factory, "pair", FLAGS)) as running:
        yield running


@pytest.fixture
def pair(running: Callable[[], Server]) -> Iterator[Server]:
    yield from restored(running())


def rank_pids(server: Server, rank: int) -> list[int]:
    return [pid for pid, command in server.processes().items() if command.endswith(f"--rank {rank}")]


def rank_pid(server: Server, rank: int) -> int:
    (pid,) = rank_pids(server, rank)
    return pid


def wait(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(timeout=PATIENCE) for future in futures]


def until_some_run(server: Server, number: int, asked: list[Future[Any]]) -> None:
    """Wait until so many requests run, or all that were asked are over already."""
    until(lambda: server.metric("vllm:num_requests_running") >= number or all(future.done() for future in asked))


def test_answers_are_what_they_would_have_been(pair: Server) -> None:
    expected = [answers(pair, body) for body in REQUESTS]
    streamed = stream(pair, {"prompt": "Tell me", **LONG})
    for victim in (0, 1):
        before = pair.metric(REPLACEMENTS)
        with ThreadPoolExecutor(32) as pool:
            asked = [pool.submit(answers, pair, body) for body in (*REQUESTS, *REQUESTS[:1] * 10)]
            streams = [pool.submit(stream, pair, {"prompt": "Tell me", **LONG}) for _ in range(2)]
            until_some_run(pair, 3, asked)
            os.kill(rank_pid(pair, victim), signal.SIGKILL)
            assert wait(asked) == [*expected, *expected[:1] * 10]
            assert wait(streams) == [streamed] * 2
        until(lambda before=before: pair.metric(REPLACEMENTS) == before + 1)
        assert f"rank {victim} ended with signal SIGKILL" in pair.output(), dump(pair.output())
    assert pair.blocks_in_use() == 0


def insert(server: Server, line: str) -> None:
    """Let the forward pass of the next reload begin with a line of its own."""
    server.replace(LLAMA, EMBED, f"{line}\n        {EMBED}")


def until_healthy(server: Server, replacements: float) -> None:
    """Wait until so many replacements are over."""
    healthy = lambda: server.control("GET", "/health").status_code == 200  # noqa: E731
    until(lambda: server.metric(REPLACEMENTS) >= replacements and healthy(), server.stacks)


def test_the_code_that_was_committed_serves_on_whatever_the_disk_holds(pair: Server) -> None:
    original = pair.text("Tell me")
    loop = "tokenspeed.runtime.engine.loop"
    path = pair.replace(LLAMA, *OTHER)
    reply = pair.reload()
    assert reply["success"], dump(reply)
    edited, before = pair.text("Tell me"), pair.metric(REPLACEMENTS)
    assert edited != original
    path.write_text("def broken(")
    pair.edit(loop, lambda text: text + "\nraise RuntimeError('an edit that needs a restart')\n")
    os.kill(rank_pid(pair, 1), signal.SIGKILL)
    until_healthy(pair, before + 1)
    assert pair.text("Tell me") == edited
    assert pair.reload_status()["generation"] == reply["generation"]
    broken = pair.reload()
    assert (broken["phase"], broken["file"]) == ("read", str(path)), dump(broken)
    pair.revert(LLAMA)
    back = pair.reload()
    assert back["success"], dump(back)
    assert back["generation"] == reply["generation"] + 1
    assert loop in {item["what"] for item in back["needs_restart"]}
    assert pair.text("Tell me") == original


HOLDS_THE_GIL = "import ctypes; ctypes.PyDLL(None).sleep(100000)"
ON_RANK_1 = "if self.embed_tokens.group.rank == 1: import time; [time.sleep(1) for _ in range(10**6)]"


@pytest.mark.parametrize(
    ("line", "rank", "sentence"),
    [
        (ON_RANK_1, 1, f"rank 1 has not got on for {TIMEOUT} s, seen in "),
        (HOLDS_THE_GIL, 0, f" for {TIMEOUT} s"),  # no sign of life, or none of getting on: whichever is told first
        ("import os; os._exit(3)", None, "ended with exit code 3"),
    ],
    ids=["loop", "gil", "exit"],
)
def test_a_reload_that_costs_ranks_has_failed(pair: Server, line: str, rank: int | None, sentence: str) -> None:
    expected, before = pair.text("Tell me"), pair.metric(REPLACEMENTS)
    insert(pair, line)
    reply = pair.reload()
    assert (reply["success"], reply["code"], reply["undone"]) == (False, "failed", True), dump(reply)
    # What a rank says last is lost when it ends its own process at once: then the phase is the one before.
    assert reply["phase"] in (("warm",) if rank is not None else ("patch", "warm")), dump(reply)
    assert sentence in reply["error"], dump(reply)
    if rank is not None:
        assert reply["rank"] == rank
    if line == ON_RANK_1:
        assert (reply["file"], reply["text"]) == (str(pair.overlay_path(LLAMA)), line), dump(reply)
    assert pair.text("Tell me") == expected
    assert pair.metric(REPLACEMENTS) == before + 1


def test_a_rank_lost_while_a_reload_drains_costs_neither_the_reload_nor_what_it_waits_for(pair: Server) -> None:
    body = {"prompt": "Tell me", **LONG, "max_tokens": 200}
    expected = answers(pair, body)
    insert(pair, "import time; time.sleep(0.03)")  # so that a drain takes its time on any machine
    generation = pair.reload()["generation"]
    pair.revert(LLAMA)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(answers, pair, body) for _ in range(3)]
        pair.wait_for_running(1)
        reloading = pool.submit(pair.reload)
        until(lambda: pair.reload_status()["state"] == "draining")
        os.kill(rank_pid(pair, 1), signal.SIGKILL)
        assert wait(asked) == [expected] * 3
        (reply,) = wait([reloading])
    assert (reply["success"], reply["generation"]) == (True, generation + 1), dump(reply)


ENDS_WITH_ITS_GENERATION = """

import pathlib, time, weakref


def wait_for(path):
    while not pathlib.Path(path).exists():
        time.sleep(0.01)


def of_this_generation(): ...
weakref.finalize(of_this_generation, wait_for, {path!r})
"""
"""What the next generation leaves out: its last reference goes when that commits."""


def test_a_reload_whose_commit_costs_a_rank_is_done_or_undone_as_its_reply_says(pair: Server, tmp_path: Path) -> None:
    go_on = tmp_path / "go"
    pair.edit(LLAMA, lambda text: text + ENDS_WITH_ITS_GENERATION.format(path=str(go_on)))
    generation, expected = pair.reload()["generation"], pair.text("Tell me")
    pair.replace(LLAMA, *OTHER)
    pair.edit(LLAMA, lambda text: text[: text.index("def of_this_generation")])
    with ThreadPoolExecutor(1) as pool:
        reloading = pool.submit(pair.reload)
        until(lambda: pair.reload_status()["state"] == "committing" or reloading.done())
        assert not reloading.done(), dump(reloading.result())
        os.kill(rank_pid(pair, 1), signal.SIGKILL)
        (reply,) = wait([reloading])
    go_on.touch()
    # Rank 0 may have told that it is done, or not yet.
    committed = reply["success"]
    assert committed or (reply["phase"], reply["rank"]) == ("commit", 1), dump(reply)
    assert pair.reload_status()["generation"] == generation + committed
    assert (pair.text("Tell me") != expected) == committed
    pair.revert(LLAMA)
    assert pair.reload()["generation"] == generation + committed + 1


UNDO_BREAKS = """
from tokenspeed_reload.undo import ParticipantState
def exchange(self): raise TypeError("no way back")
ParticipantState.exchange = exchange
raise ValueError("no further")
"""


def test_an_edit_that_cannot_be_taken_back_costs_the_ranks(pair: Server) -> None:
    expected, before = pair.text("Tell me"), pair.metric(REPLACEMENTS)
    pair.edit(LLAMA, lambda text: text + UNDO_BREAKS)
    reply = pair.reload()
    assert (reply["success"], reply["code"], reply["phase"]) == (False, "failed", "patch"), dump(reply)
    assert "a failed edit could not be undone (TypeError: no way back)" in reply["error"]
    assert pair.text("Tell me") == expected
    assert pair.metric(REPLACEMENTS) == before + 1


def test_a_request_that_only_the_edited_code_dies_of_ends_alone(pair: Server) -> None:
    insert(pair, "if input_ids.shape[0] > 400: import os; os._exit(4)")
    assert pair.reload()["success"]
    others = {"prompt": "Tell me", **LONG, "max_tokens": 80}  # four of them are fewer than 400 tokens
    expected, before = answers(pair, others), pair.metric(REPLACEMENTS)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(answers, pair, others) for _ in range(4)]
        until_some_run(pair, 1, asked)
        body = {"model": pair.served, "prompt": "a b c d " * 110, "max_tokens": 4}
        reply = HTTP.post(f"{pair.url}/v1/completions", json=body, timeout=300)
        assert reply.status_code == 500, reply.text
        assert re.search(r"the ranks were lost [234] times while this request ran \(", reply.text), reply.text
        assert wait(asked) == [expected] * 4
    assert before + 2 <= pair.metric(REPLACEMENTS) <= before + 4


def test_a_step_that_fails_on_one_of_the_ranks_ends_its_requests_alone(pair: Server) -> None:
    insert(pair, "if input_ids.shape[0] > 400 and self.embed_tokens.group.rank == 1: raise OSError('only here')")
    assert pair.reload()["success"]
    before = pair.metric(REPLACEMENTS)
    body = {"model": pair.served, "prompt": "a b c d " * 110, "max_tokens": 4}
    reply = HTTP.post(f"{pair.url}/v1/completions", json=body, timeout=300)
    assert reply.status_code == 500, reply.text
    assert "the forward pass failed with OSError: only here" in reply.text
    until_healthy(pair, before + 1)


def test_a_rank_that_is_stopped_is_lost_after_the_limit(pair: Server) -> None:
    before = pair.metric(REPLACEMENTS)
    os.kill(rank_pid(pair, 1), signal.SIGSTOP)
    until_healthy(pair, before + 1)
    assert f"rank 1 has given no sign of life for {TIMEOUT} s" in pair.output()
    assert pair.text("Tell me")
    ranks = [command for command in pair.processes().values() if "tokenspeed.rank" in command]
    assert len(ranks) == 2


def test_a_rank_that_stops_while_it_replaces_another_is_replaced_too(pair: Server) -> None:
    expected, before = pair.text("Tell me"), rank_pid(pair, 1)
    os.kill(rank_pid(pair, 0), signal.SIGKILL)
    (successor,) = until(lambda: [pid for pid in rank_pids(pair, 1) if pid != before])
    os.kill(successor, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pair.text, "Tell me")
        said = f"the ranks could not be started again: rank 1 has given no sign of life for {START_TIMEOUT} s"
        until(lambda: said in pair.output(), pair.stacks)
        assert asked.result(timeout=PATIENCE) == expected
    assert rank_pid(pair, 1) not in (before, successor)


def test_ranks_that_stop_for_a_while_in_a_start_go_on(pair: Server) -> None:
    expected, before = pair.text("Tell me"), rank_pid(pair, 1)
    os.kill(before, signal.SIGKILL)
    (successor,) = until(lambda: [pid for pid in rank_pids(pair, 1) if pid != before])
    os.kill(successor, signal.SIGSTOP)
    until(lambda: psutil.Process(successor).status() == psutil.STATUS_STOPPED)
    os.kill(successor, signal.SIGCONT)
    assert pair.text("Tell me") == expected
    assert rank_pid(pair, 1) == successor


def test_a_rank_that_stops_in_the_first_start_ends_the_server(tiny_model: Path, tmp_path: Path) -> None:
    flags = (*SMALL, "--tensor-parallel-size", "2", "--start-timeout", "5")
    server = Server(str(tiny_model), *flags, log=tmp_path / "log")
    server.launch()
    (pid,) = until(lambda: rank_pids(server, 0))
    os.kill(pid, signal.SIGSTOP)
    assert server.process.wait(PATIENCE) == 1, server.output()
    last = server.output().splitlines()[-1]
    assert "rank 0 has given no sign of life for 5 s" in last
    assert "raise --start-timeout" in last
    assert "Traceback" not in server.output()
