"""When a set of ranks is taken for lost though no process has ended."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenspeed.runtime.protocol.state import A_DOWNLOAD, Sign
from tokenspeed.server.errors import EngineLost
from tokenspeed.server.judge import LONGEST_TICK, Judge, in_start

LIMIT = 60.0


class Bench:
    """A judge, its clock, and what the ranks tell."""

    def __init__(self, size: int = 2, pid: Callable[[int], int | None] = lambda rank: None) -> None:
        self.now = 1000.0
        self.limit = LIMIT
        self.size = size
        self.judge = Judge(size, lambda: self.limit, pid, lambda: self.now)
        self.counts = [0] * size
        self.waiting: list[str | None] = [None] * size
        self.silent: set[int] = set()

    def rest(self) -> None:
        self.waiting = ["messages", *["rank 0"] * (self.size - 1)]

    def pass_time(self, seconds: float, tick: float = 1.0) -> EngineLost | None:
        """Ranks that are not silent tell each second; the first verdict."""
        end = self.now + seconds
        while self.now < end:
            self.now += tick
            for rank in set(range(self.size)) - self.silent:
                self.judge.hear(self.sign(rank))
            lost = self.judge.look()
            if lost is not None:
                return lost
        return None

    def sign(self, rank: int) -> Sign:
        return Sign(
            rank=rank,
            count=self.counts[rank],
            what="rms_norm",
            waiting_for=self.waiting[rank],
            file=__file__,
            line=1,
            function="forward",
        )


def test_ranks_that_pass_marks_are_left_alone() -> None:
    bench = Bench()
    for _ in range(10):
        assert bench.pass_time(LIMIT / 2) is None
        bench.counts[1] += 1


def test_ranks_at_rest_are_left_alone_and_have_the_whole_time_after_it() -> None:
    bench = Bench()
    bench.rest()
    assert bench.pass_time(10 * LIMIT) is None
    bench.waiting = [None, "rank 0"]
    assert bench.pass_time(LIMIT - 2) is None
    assert bench.pass_time(5) is not None


def test_a_download_takes_its_time_but_not_from_a_rank_that_is_silent() -> None:
    bench = Bench()
    bench.waiting = [A_DOWNLOAD, "rank 0"]
    assert bench.pass_time(10 * LIMIT) is None
    bench.silent = {0}
    assert bench.pass_time(2 * LIMIT) is not None


def test_a_silent_rank_is_named_under_a_short_limit_too() -> None:
    bench = Bench()
    bench.limit = 5.0
    assert bench.pass_time(2) is None
    bench.silent = {1}
    assert str(bench.pass_time(2 * LIMIT)).startswith("rank 1 has given no sign of life for 5 s")


def test_the_verdict_on_a_start_says_what_to_do() -> None:
    bench = Bench()
    bench.silent = {0, 1}
    lost = bench.pass_time(2 * LIMIT)
    assert lost is not None
    assert str(in_start(lost)).startswith("rank 0 has given no sign of life for 60 s, in the start; ")
    assert "--start-timeout" in str(in_start(lost))
    assert in_start(lost).rank == 0


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_one_who_waits_for_nobody_is_named(culprit: int) -> None:
    bench = Bench()
    bench.waiting[1 - culprit] = "all_reduce"
    lost = bench.pass_time(2 * LIMIT)
    assert lost is not None
    assert str(lost) == f"rank {culprit} has not got on for 60 s, seen in forward after rms_norm"
    assert (lost.rank, lost.file, lost.line) == (culprit, __file__, 1)
    assert lost.text is not None and "taken for lost" in lost.text


@pytest.mark.parametrize("resting", [False, True])
def test_a_rank_that_says_nothing_is_lost_at_rest_too(resting: bool) -> None:
    bench = Bench()
    if resting:
        bench.rest()
    assert bench.pass_time(20) is None
    bench.silent = {1}
    lost = bench.pass_time(2 * LIMIT)
    assert lost is not None
    assert str(lost).startswith("rank 1 has given no sign of life for 60 s, last seen in forward")


def test_ranks_that_all_wait_for_each_other_are_lost() -> None:
    bench = Bench()
    bench.waiting = ["all_reduce", "rank 0"]
    assert bench.pass_time(2 * LIMIT) is not None


def test_ranks_that_have_never_been_heard_of_are_lost() -> None:
    bench = Bench()
    bench.silent = {0, 1}
    lost = bench.pass_time(2 * LIMIT)
    assert str(lost) == "rank 0 has given no sign of life for 60 s"


def test_time_in_which_nobody_ran_does_not_count() -> None:
    bench = Bench(1)
    assert bench.pass_time(1) is None
    bench.now += 100 * LIMIT
    bench.silent = {0}
    assert bench.pass_time(1) is None
    assert bench.pass_time(LIMIT - LONGEST_TICK - 2) is None
    bench.silent.clear()
    bench.counts[0] += 1
    assert bench.pass_time(LIMIT - 2) is None


def test_without_a_limit_nobody_is_lost() -> None:
    bench = Bench()
    bench.limit = 0.0
    assert bench.pass_time(100 * LIMIT) is None


def test_a_limit_counts_from_when_it_holds() -> None:
    bench = Bench()
    bench.limit = 10 * LIMIT
    assert bench.pass_time(5 * LIMIT) is None
    bench.limit = LIMIT
    assert bench.pass_time(LIMIT - 2) is None
    assert bench.pass_time(5) is not None


def test_processes_that_no_debugger_holds_are_judged() -> None:
    bench = Bench(1, lambda rank: os.getpid())
    traced = "TracerPid:\t0\n" not in Path("/proc/self/status").read_text()
    assert (bench.pass_time(2 * LIMIT) is None) == traced
