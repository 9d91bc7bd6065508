"""The process that compiles grammars: `python -m tokenspeed.grammar.worker`.

It reads `Job`s and `Cancel`s from its standard input and writes `Outcome`s to its standard output, each with its
length before it. Every grammar is compiled in a fork of its own, so that one that takes for ever, wants all the
memory, or crashes the library ends alone. The fork is cheap: library and vocabulary are loaded once, before it.
"""

from __future__ import annotations

import argparse
import os
import resource
import selectors
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec
import psutil

from tokenspeed.grammar.errors import GrammarError
from tokenspeed.grammar.jobs import LENGTH, Cancel, Job, Outcome, frame
from tokenspeed.lifeline import tie_to_parent

AT_ONCE = 4
"""Grammars that are compiled at the same time."""

NICENESS = 10
"""The engine comes first."""


@dataclass
class Attempt:
    """A fork at work. `read_end` is closed by it at its end."""

    job: Job
    process: int
    read_end: int
    deadline: float
    data: bytearray = field(default_factory=bytearray)
    out_of_time: bool = False
    cancelled: bool = False


class Worker:
    """Forks for the jobs as they come, a few at a time, and passes their outcomes on."""

    def __init__(
        self, directory: str, vocab_size: int, eos_token_ids: list[int], time_limit: float, memory_limit: int
    ) -> None:
        self.directory = directory
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.time_limit = time_limit
        self.memory_limit = memory_limit
        self._selector = selectors.DefaultSelector()
        self._input = bytearray()
        self._waiting: deque[Job] = deque()
        self._attempts: dict[int, Attempt] = {}
        self._decoder: msgspec.msgpack.Decoder[Job | Cancel] = msgspec.msgpack.Decoder(Job | Cancel)

    def load(self) -> None:
        """Load what every fork needs."""
        from tokenspeed.grammar.compiler import Compiler
        from tokenspeed.grammar.vocabulary import read_vocabulary

        self._compiler = Compiler(read_vocabulary(self.directory, self.vocab_size, self.eos_token_ids))

    def run(self, source: int, sink: int) -> None:
        """Work until `source` ends; both are file descriptors."""
        self._sink = sink
        self._selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(self._seconds_to_deadline()):
                if key.fd != source:
                    self._read_from_fork(self._attempts[key.fd])
                elif not self._read_jobs(source):
                    return
            self._end_late_ones()
            while self._waiting and len(self._attempts) < AT_ONCE:
                self._begin(self._waiting.popleft())

    def _read_jobs(self, source: int) -> bool:
        data = os.read(source, 1 << 16)
        self._input += data
        while len(self._input) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._input)[0]
            if len(self._input) < end:
                break
            message: Job | Cancel = self._decoder.decode(self._input[LENGTH.size : end])
            del self._input[:end]
            if isinstance(message, Job):
                self._waiting.append(message)
            else:
                self._cancel(message.number)
        return bool(data)

    def _cancel(self, number: int) -> None:
        self._waiting = deque(job for job in self._waiting if job.number != number)
        for attempt in self._attempts.values():
            if attempt.job.number == number:
                attempt.cancelled = True
                os.kill(attempt.process, signal.SIGKILL)

    def _begin(self, job: Job) -> None:
        read_end, write_end = os.pipe()
        parent = os.getpid()
        process = os.fork()
        if not process:
            self._compile_and_exit(job, write_end, parent)
        os.close(write_end)
        self._attempts[read_end] = Attempt(job, process, read_end, time.monotonic() + self.time_limit)
        self._selector.register(read_end, selectors.EVENT_READ)

    def _compile_and_exit(self, job: Job, write_end: int, parent: int) -> NoReturn:
        """The fork's whole life. Nothing of its parent may be cleaned up by it, so it never returns."""
        try:
            tie_to_parent(parent)
            os.nice(NICENESS)
            most = psutil.Process().memory_info().vms + self.memory_limit
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            try:
                outcome = Outcome(job.number, compiled=self._compiler.compile(job.grammar))
            except GrammarError as error:
                outcome = Outcome(job.number, error=str(error))
            _write(write_end, frame(outcome))
        finally:
            os._exit(0)

    def _read_from_fork(self, attempt: Attempt) -> None:
        data = os.read(attempt.read_end, 1 << 20)
        attempt.data += data
        if data:
            return
        self._selector.unregister(attempt.read_end)
        os.close(attempt.read_end)
        del self._attempts[attempt.read_end]
        _, status = os.waitpid(attempt.process, 0)
        if not attempt.cancelled:
            whole = _is_whole(attempt.data)
            _write(self._sink, bytes(attempt.data) if whole else frame(self._failed(attempt, status)))

    def _failed(self, attempt: Attempt, status: int) -> Outcome:
        kind = attempt.job.grammar.kind
        if attempt.out_of_time:
            error = f"the {kind} took longer than {self.time_limit:g} s to compile; simplify it"
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGABRT:
            error = f"the {kind} crashed its compiler ({signal.Signals(os.WTERMSIG(status)).name}); simplify it"
        else:
            error = f"the {kind} takes more than {self.memory_limit >> 20} MiB of memory to compile; simplify it"
        return Outcome(attempt.job.number, error=error)

    def _end_late_ones(self) -> None:
        now = time.monotonic()
        for attempt in self._attempts.values():
            if now >= attempt.deadline and not attempt.out_of_time:
                attempt.out_of_time = True
                os.kill(attempt.process, signal.SIGKILL)

    def _seconds_to_deadline(self) -> float | None:
        deadlines = [attempt.deadline for attempt in self._attempts.values() if not attempt.out_of_time]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None


def _is_whole(data: bytearray) -> bool:
    return len(data) > LENGTH.size and len(data) == LENGTH.size + LENGTH.unpack_from(data)[0]


def _write(sink: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(sink, view) :]


def main() -> None:
    """Serve standard input until it ends."""
    parser = argparse.ArgumentParser(prog="python -m tokenspeed.grammar.worker", description=__doc__)
    parser.add_argument("--tokenizer", required=True, help="directory with tokenizer.json")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--eos", type=int, nargs="+", required=True, help="ids that end an answer")
    parser.add_argument("--time-limit", type=float, required=True, help="seconds for one grammar")
    parser.add_argument("--memory-limit", type=int, required=True, help="bytes for one grammar")
    options = parser.parse_args()
    # Ctrl-C in a terminal is for the front.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a library prints must not get among the outcomes.
    sink = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    worker = Worker(options.tokenizer, options.vocab_size, options.eos, options.time_limit, options.memory_limit)
    worker.load()
    worker.run(sys.stdin.fileno(), sink)


if __name__ == "__main__":
    main()
