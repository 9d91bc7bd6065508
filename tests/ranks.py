"""Ranks in processes of their own, over gloo, that run one engine after the other: real start-up, loop and channel.

Starting a process with torch takes seconds, so that the tests of a session share these.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from tests.waiting import PATIENCE, gather
from tokenspeed.runtime.config import Config, ParallelOptions
from tokenspeed.runtime.distributed.channel import Channel
from tokenspeed.runtime.engine.agreement import StepDigest
from tokenspeed.runtime.engine.directives import Directive, StreamMessage
from tokenspeed.runtime.engine.stream import FrontStream, PeerStream, Stream
from tokenspeed.runtime.protocol.calls import Stop, Submit, ToEngine
from tokenspeed.runtime.protocol.message import Message
from tokenspeed.runtime.protocol.reports import Outputs, Ready, RequestOutput, Starting
from tokenspeed.runtime.protocol.sampling import SamplingParams


@dataclass
class Job:
    """One engine on some ranks, and what it is told."""

    config: Config
    run_dir: Path
    rounds: list[list[bytes]]
    """What arrives in each round of the loop, encoded; after the last one it ends where it would wait for more."""
    change: str = ""
    """Code that rank 1 executes before it starts up, how a test makes the ranks differ; it defines `undo`."""


@dataclass
class Told:
    """What one rank has to say of a job."""

    error: str = ""
    sent: list[Message] = field(default_factory=list)
    num_blocks: int = 0
    weight_bytes: int = 0
    memory: int = 0
    """Bytes of the process that are no file's, after loading less those before."""


class RankProcesses:
    """`size` processes; a job may use fewer."""

    def __init__(self, size: int) -> None:
        self.size = size

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, there), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def stop(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(PATIENCE)
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def run(
        self, ranks: int, config: Config, rounds: Sequence[Sequence[ToEngine]] = (), change: str = ""
    ) -> list[Told]:
        """What each of `ranks` ranks has to say."""
        spread = replace(config, parallel=ParallelOptions(tensor_parallel_size=ranks))
        # A Unix socket's path may have about 100 characters; pytest's own folders are longer.
        with tempfile.TemporaryDirectory(prefix="ts-") as run_dir:
            encoded = [[msgspec.msgpack.encode(message) for message in messages] for messages in rounds]
            for end in self._ends[:ranks]:
                end.send(Job(spread, Path(run_dir), encoded, change))
            return self._told(ranks)

    def _told(self, ranks: int) -> list[Told]:
        """What the ranks say. One that says nothing in time shows its stacks, and all are started anew."""
        told: dict[int, Told] = gather(self._processes, self._ends[:ranks], lambda found: found.error)
        if len(told) < ranks:
            self.kill()
            self.start()
        return [
            told.get(rank, Told(error=f"rank {rank} said nothing; its stacks are in stderr")) for rank in range(ranks)
        ]

    def generate(
        self, ranks: int, config: Config, prompts: Sequence[list[int]], sampling: SamplingParams
    ) -> list[list[RequestOutput]]:
        """The outputs of each request, all submitted at once."""
        submits = [Submit(request_id=str(i), prompt=prompt, sampling=sampling) for i, prompt in enumerate(prompts)]
        told = check(self.run(ranks, config, [submits]))
        outputs: dict[str, list[RequestOutput]] = {submit.request_id: [] for submit in submits}
        for message in told[0].sent:
            if isinstance(message, Outputs):
                for output in message.outputs:
                    outputs[output.request_id].append(output)
        return list(outputs.values())


def check(told: list[Told]) -> list[Told]:
    """No rank failed, and all have as many KV blocks."""
    assert not any(rank.error for rank in told), "\n".join(rank.error for rank in told)
    assert len({rank.num_blocks for rank in told}) == 1
    return told


def tokens(outputs: Sequence[Sequence[RequestOutput]]) -> list[list[int]]:
    """The ids of each answer."""
    return [[token for output in answer for token in output.token_ids] for answer in outputs]


class FedStream(FrontStream):
    """Rank 0's stream: what the job brings."""

    def __init__(self, channel: Channel, digest: StepDigest, rounds: list[list[StreamMessage]]) -> None:
        super().__init__(channel, digest)
        self.rounds = rounds

    def receive(self, directives: Sequence[Directive], wait_s: float | None) -> list[StreamMessage]:
        if not self.rounds and not directives and wait_s != 0:
            self.rounds = [[Stop()]]
        return super().receive(directives, wait_s)

    def _arrived(self, wait_s: float | None) -> list[StreamMessage]:
        return self.rounds.pop(0) if self.rounds else []


def serve(rank: int, end: Connection) -> None:
    """The life of one process."""
    faulthandler.register(signal.SIGUSR1)
    while True:
        try:
            job = end.recv()
        except EOFError:
            return
        told = Told()
        change: dict[str, Any] = {"undo": lambda: None}
        try:
            if rank == 1:
                exec(job.change, change)
            work(rank, job, told)
        except BaseException as error:
            told.error = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        finally:
            change["undo"]()
            clean_up()
        end.send(told)


def work(rank: int, job: Job, told: Told) -> None:
    from tokenspeed.offline.engine import LocalOutbox
    from tokenspeed.runtime.engine.process import build
    from tokenspeed.runtime.engine.startup import Startup

    channel = Channel(rank, job.config.parallel.tensor_parallel_size, job.run_dir)
    outbox = LocalOutbox(rank, job.run_dir)
    digest = StepDigest()
    stream: Stream = PeerStream(channel, digest)
    if rank == 0:
        decoder = msgspec.msgpack.Decoder(ToEngine)
        rounds = [[decoder.decode(message) for message in messages] for messages in job.rounds]
        stream = FedStream(channel, digest, rounds)
    before = own_memory()
    channel.open()
    try:
        startup = Startup(job.config, channel, outbox)
        loop = build(startup, stream, None, digest)
        told.num_blocks = loop.executor.pool.usable_blocks
        told.weight_bytes = loop.executor.model.weight_bytes(loop.executor.hidden.dtype)
        told.memory = own_memory() - before
        loop.run()
        told.sent = [message for message in outbox.take() if not isinstance(message, Starting | Ready)]
        startup.close()
    finally:
        channel.close()


def clean_up() -> None:
    from torch import distributed

    if distributed.is_initialized():  # the job failed
        distributed.destroy_process_group()
    gc.unfreeze()  # start-up froze its objects
    gc.collect()


def own_memory() -> int:
    """Bytes of this process that are no file's."""
    for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise RuntimeError("no RssAnon")
