"""Two GPUs: a fault of one rank frees the other from a collective of the trial, and what serves goes on."""

from __future__ import annotations

import faulthandler
import multiprocessing
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests.waiting import gather
from tokenspeed.runtime.distributed.channel import Channel
from tokenspeed.runtime.distributed.errors import culprit, is_victim
from tokenspeed.runtime.distributed.vote import Ballot, Verdict, Vote
from tokenspeed.runtime.distributed.world import World

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


class TrialRank:
    """One rank in a process of its own, with a graph on the communicator that serves."""

    def __init__(self, rank: int, run_dir: Path):
        self.rank = rank
        self.device = torch.device("cuda", rank)
        self.channel = Channel(rank, 2, run_dir)
        self.world = World(rank, 2, run_dir, self.device)

    def open(self) -> None:
        torch.cuda.set_device(self.device)
        self.channel.open()
        self.world.join()
        self.world.make_spare()
        self.numbers = torch.zeros(8, device=self.device)
        self.sums = torch.zeros(8, device=self.device)
        self.graph = self.capture()

    def capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            self.sums.copy_(self.world.group.all_reduce(self.numbers + 1))
        return graph

    def serve(self) -> None:
        for value in range(3):
            self.numbers.fill_(value)
            self.graph.replay()
            assert self.sums.tolist() == [2.0 * value + 2] * 8

    def phase(self, work: Callable[[], None]) -> Verdict:
        vote = Vote(self.channel)
        ballot = Ballot(rank=self.rank)
        try:
            with self.world.group.trial("warm", vote):
                work()
                torch.cuda.synchronize(self.device)
        except BaseException as error:
            fault = {"error": str(error)}
            ballot = Ballot(rank=self.rank, error=fault, is_victim=is_victim(error, self.rank), culprit=culprit(error))
        return vote.cast(ballot)

    def fails(self, work: Callable[[], None]) -> None:
        failed = self.phase(work).failed
        assert failed is not None and failed.error is not None
        assert (failed.rank, failed.error["error"]) == (1, "my own fault"), failed
        self.world.renew_spare()
        self.serve()

    def close(self) -> None:
        del self.graph
        self.world.leave()
        self.channel.close()

    def run(self) -> None:
        self.open()
        self.serve()
        self.fails(self.fail_before)
        self.fails(self.fail_while_the_other_waits_on_the_host)
        self.fails(self.leave_the_other_stuck_on_the_device)
        self.commit()
        self.close()

    def fail_before(self) -> None:
        if self.rank == 1:
            raise ValueError("my own fault")
        self.world.group.all_reduce(self.numbers)

    def fail_while_the_other_waits_on_the_host(self) -> None:
        graphs = [self.capture() for _ in range(2)]
        if self.rank == 1:
            raise ValueError("my own fault")
        self.world.group.all_reduce(self.numbers)
        graphs.clear()

    def leave_the_other_stuck_on_the_device(self) -> None:
        if self.rank == 1:
            raise ValueError("my own fault")
        spare = self.world.group.spare
        assert spare is not None
        spare.all_reduce(self.numbers)  # nobody has agreed to it

    def commit(self) -> None:
        graphs: list[torch.cuda.CUDAGraph] = []
        assert self.phase(lambda: graphs.append(self.capture())).failed is None
        self.graph = graphs.pop()
        self.world.group.promote({})
        assert self.world.why_no_spare is None
        self.serve()
        self.fails(self.leave_the_other_stuck_on_the_device)


def live(rank: int, run_dir: Path, end: Connection) -> None:
    faulthandler.register(signal.SIGUSR1)
    try:
        TrialRank(rank, run_dir).run()
        end.send("")
    except BaseException:
        end.send(traceback.format_exc())


def test_the_graphs_that_serve_outlive_every_failed_trial() -> None:
    context = multiprocessing.get_context("spawn")
    # A Unix socket's path may have about 100 characters; pytest's own folders are longer.
    with tempfile.TemporaryDirectory(prefix="ts-") as run_dir:
        ends, processes = [], []
        for rank in range(2):
            here, there = context.Pipe()
            processes.append(context.Process(target=live, args=(rank, Path(run_dir), there), daemon=True))
            processes[-1].start()
            there.close()
            ends.append(here)
        told = gather(processes, ends, bool)
        for process in processes:
            process.kill()
        assert told == {0: "", 1: ""}
