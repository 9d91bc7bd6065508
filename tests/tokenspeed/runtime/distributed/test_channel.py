"""The star of ranks: one order of messages, one verdict, and silence noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import pytest

from tests.waiting import PATIENCE
from tokenspeed.runtime.distributed.channel import Channel
from tokenspeed.runtime.distributed.errors import RankLost
from tokenspeed.runtime.distributed.vote import Ballot, Vote

Result = TypeVar("Result")


@pytest.fixture
def run_dir() -> Iterator[Path]:
    # A Unix socket's path may have about 100 characters; pytest's own folders are longer.
    with TemporaryDirectory(prefix="ts-") as directory:
        yield Path(directory)


@contextmanager
def ranks(size: int, run_dir: Path) -> Iterator[list[Channel]]:
    channels = [Channel(rank, size, run_dir) for rank in range(size)]
    for channel in channels:
        channel.open()
    try:
        yield channels
    finally:
        for channel in channels:
            channel.close()


def on_every_rank(channels: list[Channel], work: Callable[[Channel], Result]) -> list[Result | BaseException]:
    results: list[Result | BaseException] = [RuntimeError("did not run")] * len(channels)

    def run(channel: Channel) -> None:
        try:
            results[channel.rank] = work(channel)
        except BaseException as error:
            results[channel.rank] = error

    threads = [threading.Thread(target=run, args=(channel,)) for channel in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_every_rank_gets_rank_0s_messages_in_order(run_dir: Path) -> None:
    with ranks(3, run_dir) as channels:

        def work(channel: Channel) -> list[bytes]:
            mine = [bytes([n]) if channel.rank == 0 else None for n in range(20)]
            return [channel.broadcast(payload) for payload in mine]

        assert on_every_rank(channels, work) == [[bytes([n]) for n in range(20)]] * 3


def test_every_rank_gets_what_each_has(run_dir: Path) -> None:
    with ranks(3, run_dir) as channels:

        def work(channel: Channel) -> list[list[bytes]]:
            return [channel.exchange(bytes([channel.rank, n])) for n in range(3)]

        assert on_every_rank(channels, work) == [[[bytes([r, n]) for r in range(3)] for n in range(3)]] * 3


def test_one_failure_is_every_ranks_verdict(run_dir: Path) -> None:
    with ranks(3, run_dir) as channels:

        def work(channel: Channel) -> tuple[int, object, float]:
            error = {"error": "boom"} if channel.rank == 2 else None
            verdict = Vote(channel).cast(Ballot(rank=channel.rank, seconds=channel.rank / 10, error=error), PATIENCE)
            assert verdict.failed is not None
            return verdict.failed.rank, verdict.failed.error, verdict.seconds

        assert on_every_rank(channels, work) == [(2, {"error": "boom"}, 0.2)] * 3


def test_a_vote_of_one_rank_needs_nobody(run_dir: Path) -> None:
    with ranks(1, run_dir) as (channel,):
        assert Vote(channel).cast(Ballot(rank=0), 1).failed is None
        assert channel.broadcast(b"x") == b"x"
        assert channel.exchange(b"x") == [b"x"]


def test_a_silent_rank_is_named(run_dir: Path) -> None:
    with ranks(2, run_dir) as channels, pytest.raises(RankLost, match="rank 1 did not answer rank 0"):
        Vote(channels[0]).cast(Ballot(rank=0), 0.2)
