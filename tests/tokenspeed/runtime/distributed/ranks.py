"""Ranks as threads of this process, for what needs neither a model nor a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from torch.distributed import HashStore, PrefixStore, Store

from tokenspeed.runtime.distributed.agreement import Agreement
from tokenspeed.runtime.distributed.channel import Channel
from tokenspeed.runtime.distributed.gloo import GlooCommunicator
from tokenspeed.runtime.distributed.group import Group

Result = TypeVar("Result")


class Rank:
    """One rank: its channel and its group, which meets the others in `store`."""

    def __init__(self, channel: Channel, store: Store):
        self.channel = channel
        self.group = Group("tp", channel.rank, channel.size)
        self._store = store
        self._made = 0

    def join(self) -> None:
        self.group.serving = self.communicator()
        self.group.serving.open()
        self.make_spare()

    def make_spare(self) -> None:
        self.group.spare = self.communicator()
        self.group.agreement = Agreement(self.communicator(), self.channel.rank, self.channel.size)
        self.group.spare.open()
        self.group.agreement.open()

    def communicator(self) -> GlooCommunicator:
        self._made += 1
        return GlooCommunicator(PrefixStore(str(self._made), self._store), self.channel.rank, self.channel.size)


@contextmanager
def channels(size: int, run_dir: Path) -> Iterator[list[Channel]]:
    """Channels of `size` ranks that are connected."""
    made = [Channel(rank, size, run_dir) for rank in range(size)]
    for channel in made:
        channel.open()
    try:
        yield made
    finally:
        for channel in made:
            channel.close()


@contextmanager
def connected_ranks(size: int, run_dir: Path) -> Iterator[list[Rank]]:
    """Ranks whose groups have all their communicators."""
    store = HashStore()
    with channels(size, run_dir) as opened:
        ranks = [Rank(channel, store) for channel in opened]
        assert on_every_rank(ranks, Rank.join) == [None] * size
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.group.discard()
                if rank.group.serving is not None:
                    rank.group.serving.close()


def on_every_rank(ranks: list[Result], work: Callable[[Result], object]) -> list[object]:
    """What `work` returns or raises on each rank, all at the same time."""
    results: list[object] = [RuntimeError("did not run")] * len(ranks)

    def run(index: int) -> None:
        try:
            results[index] = work(ranks[index])
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
