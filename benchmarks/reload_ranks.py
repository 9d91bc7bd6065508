"""What ranks cost: reloads by phase, steps, and what the ranks say to each other, by their number.

    python -m benchmarks.reload_ranks [--model tiny] [--ranks 1 2 4] [--reloads 7] [-- flags of ts serve]

The model is a directory, a name, or `tiny`, a random Llama of two layers. Its heads have to divide among the ranks:
`--model smollm2 --ranks 1 3`. Figures are medians: of reloads of an edited layer in milliseconds, phase by phase as the
reply gives them; of one decode step of one request, as a client sees it; of the time from the kill of a rank to the end
of the request that it interrupted; and of a round of the ranks' messages, and a vote, when there is nothing to say.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from tests.e2e.harness import Server, dump

LAYER = "tokenspeed.runtime.layers.activation"
GRAPHS = ("--cpu-graphs", "--cudagraph-capture-sizes", "1", "2", "--prefill-graph-max-tokens", "32")
PHASES = ("drain", "read", "patch", "warm", "graphs", "total")

STEPS = 64
"""Decode steps of a request that is timed."""

LASTING_S = 1.0
"""Seconds that the request lasts at least whose rank is killed, so that it runs when it is looked for."""
LONGEST = 480
"""Tokens of that request at most."""

ROUNDS = 2000
"""Rounds of messages that are timed together."""


def main() -> None:
    """Measure each number of ranks, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--reloads", type=int, default=7)
    parser.add_argument("flags", nargs="*", help="passed on to ts serve (default: --cpu-graphs with few sizes)")
    args = parser.parse_args()
    print("idle, us      " + "".join(f"{name:>12}" for name in ("round", "vote")))
    for size in args.ranks:
        print(f"{size} ranks       " + "".join(f"{value:12.0f}" for value in idle_rounds(size)))
    with tempfile.TemporaryDirectory() as scratch:
        model = tiny(Path(scratch, "model")) if args.model == "tiny" else args.model
        print(f"\n{args.model}, ms  " + "".join(f"{name:>9}" for name in (*PHASES, "wait", "step", "loss")))
        for size in args.ranks:
            figures = measure(model, size, args.reloads, args.flags or GRAPHS, Path(scratch, str(size)))
            print(f"{size} ranks       " + "".join(f"{1000 * value:9.1f}" for value in figures), flush=True)


def tiny(directory: Path) -> str:
    """A small random model."""
    from tests.tiny import tiny_llama

    return str(tiny_llama(directory))


def measure(model: str, ranks: int, reloads: int, flags: Sequence[str], scratch: Path) -> list[float]:
    """Seconds of each phase of a reload, from its call to the first token after it, of a decode step, of a loss."""
    scratch.mkdir()
    spread = ("--max-model-len", "512", "--tensor-parallel-size", str(ranks), *flags)
    server = Server(model, *spread, overlay=scratch / "overlay", log=scratch / "log").start()
    try:
        first_token(server)
        replies: list[dict[str, Any]] = []
        waits = []
        for number in range(reloads):
            lines = f"\n# edit {number}\nEDIT_{number} = {number}\n"
            server.edit(LAYER, lambda text, lines=lines: text + lines)  # type: ignore[misc]

            def wait() -> None:
                replies.append(server.reload())
                first_token(server)

            waits.append(timed(wait))
        for reply in replies:
            assert reply["success"] and reply["modules"], dump(reply)
        phases = [median(reply["seconds"][phase] for reply in replies) for phase in PHASES]
        step = decode_step(server)
        return [*phases, median(waits), step, loss(server, min(LONGEST, max(STEPS, round(LASTING_S / step))))]
    finally:
        server.stop()


def decode_step(server: Server) -> float:
    """Seconds of one step with one request."""
    once = median(timed(lambda: first_token(server)) for _ in range(5))
    many = median(timed(lambda: answer(server, STEPS)) for _ in range(5))
    return (many - once) / (STEPS - 1)


def first_token(server: Server) -> None:
    """Ask for one token."""
    server.complete("Hello", max_tokens=1)


def answer(server: Server, steps: int) -> None:
    """Let one request run for so many steps."""
    server.complete("Hello", max_tokens=steps, ignore_eos=True)


def loss(server: Server, steps: int) -> float:
    """Seconds from the kill of the last rank, while a request of so many steps runs, to the end of that request."""
    ranks = [pid for pid, line in server.processes().items() if "tokenspeed.rank" in line]
    request = threading.Thread(target=answer, args=(server, steps))
    request.start()
    server.wait_for_running()
    started = time.perf_counter()
    os.kill(max(ranks), signal.SIGKILL)
    request.join()
    return time.perf_counter() - started


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def idle_rounds(size: int) -> tuple[float, float]:
    """Microseconds of a round of messages in which nobody has anything to say, and of a vote without a fault."""
    context = multiprocessing.get_context("spawn")
    # A socket's path may not be long.
    with tempfile.TemporaryDirectory(prefix="ts-") as run_dir:
        pipes = [context.Pipe() for _ in range(size)]
        processes = [
            context.Process(target=be_idle, args=(rank, size, Path(run_dir), pipes[rank][1])) for rank in range(size)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()  # so that the end of rank 0 is the end of the pipe
        found: tuple[float, float] = pipes[0][0].recv()
        for process in processes:
            process.join()
    return found


def be_idle(rank: int, size: int, run_dir: Path, out: Connection) -> None:
    """One rank of `idle_rounds`; rank 0 tells the figures."""
    from tokenspeed.runtime.distributed.channel import Channel
    from tokenspeed.runtime.distributed.vote import Ballot, Vote
    from tokenspeed.runtime.engine.agreement import StepDigest
    from tokenspeed.runtime.engine.stream import FrontStream, PeerStream, Stream

    channel = Channel(rank, size, run_dir)
    channel.open()
    stream: Stream
    if rank == 0:
        stream = front = FrontStream(channel, StepDigest())
        front.open()
    else:
        stream = PeerStream(channel, StepDigest())

    def rounds() -> None:
        for _ in range(ROUNDS):
            stream.receive((), 0)
        channel.exchange(b"")  # rank 0 only sends: the time is that of the slowest

    def votes() -> None:
        for _ in range(ROUNDS):
            Vote(channel).cast(Ballot(rank=rank), 60)

    votes()
    figures = timed(rounds), timed(votes)
    if rank == 0:
        out.send(tuple(seconds / ROUNDS * 1e6 for seconds in figures))
    channel.close()


if __name__ == "__main__":
    main()
