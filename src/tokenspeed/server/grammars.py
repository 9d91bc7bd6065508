"""Grammars of requests, compiled by a process of their own."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from tokenspeed.errors import TokenSpeedError
from tokenspeed.grammar.errors import GrammarError, is_installed
from tokenspeed.grammar.jobs import LENGTH, Cancel, Job, Outcome, frame
from tokenspeed.runtime.protocol.sampling import Grammar
from tokenspeed.runtime.protocol.state import EngineInfo
from tokenspeed.server.errors import QueueFull, UnsupportedCall

log = logging.getLogger(__name__)

TIME_LIMIT = 30.0
"""Seconds for one grammar."""

LOAD_LIMIT = 120.0
"""Seconds that the worker gets to load what it needs. A grammar that ends in time or not is told behind them."""

MEMORY_LIMIT = 2 * 2**30
"""Bytes for one grammar."""

MOST_WAITING = 256
"""Grammars that are being compiled or wait for it."""

KEPT = 256
KEPT_BYTES = 64 * 2**20
"""Outcomes that are kept for requests to come, and their bytes."""

SINGLE_THREADED = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""The worker forks, which is safe only while it has one thread."""

Source = tuple[str, str]


@dataclass
class Compilation:
    """A grammar on its way."""

    number: int
    outcome: asyncio.Future[Outcome]
    clients: int = 0
    """Requests that wait for it."""


class GrammarCompiler:
    """Compiles each grammar once, however many requests bring it. The worker starts with the first of them.

    `on_first` is called when that starts, so that the ranks can load meanwhile what they need.
    """

    def __init__(
        self,
        on_first: Callable[[], None],
        time_limit: float = TIME_LIMIT,
        memory_limit: int = MEMORY_LIMIT,
        load_limit: float = LOAD_LIMIT,
    ) -> None:
        self._on_first = on_first
        self._time_limit = time_limit
        self._memory_limit = memory_limit
        self._patience = load_limit + time_limit
        self._heard = 0.0
        """When the last outcome came, or the first of those that wait was asked for."""
        self._numbers = itertools.count(1)
        self._outcomes: OrderedDict[Source, Outcome] = OrderedDict()
        self._bytes = 0
        self._waiting: dict[Source, Compilation] = {}
        self._sources: dict[int, Source] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._info: EngineInfo | None = None

    def open(self, info: EngineInfo) -> None:
        """Say whose grammars these are."""
        self._info = info

    async def compile(self, grammar: Grammar) -> bytes:
        """The compiled form.

        Raises:
            UnsupportedCall: when xgrammar is not installed, or the model has no end.
            GrammarError: when the grammar is not valid, or too much to compile.
            QueueFull: when too many wait already.
            TokenSpeedError: when the worker ended.
        """
        source = (grammar.kind, grammar.text)
        if source in self._outcomes:
            self._outcomes.move_to_end(source)
            outcome = self._outcomes[source]
        else:
            outcome = await self._compiled(source, grammar)
        if outcome.error:
            raise GrammarError(outcome.error)
        return outcome.compiled

    async def close(self) -> None:
        """End the worker; what waits for it fails."""
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        if self._reading is not None:
            await self._reading

    async def _compiled(self, source: Source, grammar: Grammar) -> Outcome:
        self._check()
        await self._started()
        if source not in self._waiting:
            if len(self._waiting) >= MOST_WAITING:
                raise QueueFull(f"{MOST_WAITING} grammars are waiting to be compiled; try again later")
            if not self._waiting:
                self._heard = time.monotonic()
            compilation = Compilation(next(self._numbers), asyncio.get_running_loop().create_future())
            self._waiting[source] = compilation
            self._sources[compilation.number] = source
            self._write(frame(Job(compilation.number, grammar)))
        compilation = self._waiting[source]
        compilation.clients += 1
        try:
            return await self._outcome_of(compilation)
        finally:
            compilation.clients -= 1
            if not compilation.clients:
                self._cancel(source, compilation)

    async def _outcome_of(self, compilation: Compilation) -> Outcome:
        while not compilation.outcome.done():
            left = self._heard + self._patience - time.monotonic()
            if left <= 0:
                log.warning("the compiler of grammars has said nothing for %g s; it is ended", self._patience)
                await self.close()
            else:
                await asyncio.wait([compilation.outcome], timeout=left)
        return compilation.outcome.result()

    def _cancel(self, source: Source, compilation: Compilation) -> None:
        """Nobody waits any more: unless it has ended, it goes on for nobody."""
        if self._waiting.get(source) is compilation:
            del self._waiting[source]
            del self._sources[compilation.number]
            self._write(frame(Cancel(compilation.number)))

    def _check(self) -> None:
        if not is_installed():
            raise UnsupportedCall("structured output needs xgrammar; run `pip install 'tokenspeed[structured]'`")
        assert self._info is not None
        if not self._info.eos_token_ids:
            raise UnsupportedCall("structured output needs a model with an end-of-text token; this one has none")

    async def _started(self) -> None:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                if self._reading is not None:
                    await self._reading  # it still has to fail what the last worker left
                self._on_first()
                self._process = await self._start()
                self._reading = asyncio.create_task(self._read(self._process))

    def _write(self, data: bytes) -> None:
        """To the worker; when that has ended, the reader is about to say so."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(data)

    async def _start(self) -> asyncio.subprocess.Process:
        assert self._info is not None
        options = ["--tokenizer", self._info.tokenizer_path, "--vocab-size", str(self._info.vocab_size)]
        options += ["--time-limit", str(self._time_limit), "--memory-limit", str(self._memory_limit)]
        options += ["--eos", *map(str, self._info.eos_token_ids)]
        lifeline = (sys.executable, "-m", "tokenspeed.lifeline", str(os.getpid()))
        return await asyncio.create_subprocess_exec(
            *lifeline,
            *(sys.executable, "-m", "tokenspeed.grammar.worker", *options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            process_group=0,
            env={**os.environ, **SINGLE_THREADED},
        )

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hand out what the worker says, until it ends."""
        assert process.stdout is not None
        with suppress(asyncio.IncompleteReadError):
            while True:
                (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                self._take(msgspec.msgpack.decode(await process.stdout.readexactly(length), type=Outcome))
        await process.wait()
        ended, self._waiting = self._waiting, {}
        self._sources.clear()
        for compilation in ended.values():
            compilation.outcome.set_exception(TokenSpeedError("the compiler of grammars ended; see its messages above"))

    def _take(self, outcome: Outcome) -> None:
        self._heard = time.monotonic()
        source = self._sources.pop(outcome.number, None)
        if source is None:
            return  # it was cancelled when it was about to end
        self._waiting.pop(source).outcome.set_result(outcome)
        self._outcomes[source] = outcome
        self._bytes += len(outcome.compiled)
        while len(self._outcomes) > KEPT or self._bytes > KEPT_BYTES:
            _, oldest = self._outcomes.popitem(last=False)
            self._bytes -= len(oldest.compiled)
