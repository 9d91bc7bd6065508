"""One set of ranks, from its start to its loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tokenspeed.errors import ResourceError
from tokenspeed.runtime.config import Config
from tokenspeed.runtime.protocol.blackbox import Work, read_work
from tokenspeed.runtime.protocol.reports import Failed, Ready, Starting, ToFront
from tokenspeed.runtime.protocol.state import EngineInfo
from tokenspeed.server.committed import CommittedCode
from tokenspeed.server.errors import EngineLost
from tokenspeed.server.judge import TICK, Judge, in_start
from tokenspeed.server.kept import KeptMemory
from tokenspeed.server.link import Link
from tokenspeed.server.ranks import FAILED_MESSAGE_GRACE, Ranks

log = logging.getLogger(__name__)

VICTIM_GRACE = 4 * FAILED_MESSAGE_GRACE
"""Seconds that the loss of another rank gets to be noticed after one has said that its peers left it."""


class Incarnation:
    """Ranks, and the sockets to them, in a directory of their own.

    `ready` is done when they serve, `lost` when one of them cannot go on, or has not got on for `limit()` seconds (0 is
    for ever). What else they say goes to `take`. They run `code`, as far as there is some, and else what the disk has.
    Their weights are in `kept`, where ranks after them find them.
    """

    def __init__(
        self,
        directory: Path,
        config: Config,
        command: Sequence[str],
        on_starting: Callable[[Starting], None],
        take: Callable[[ToFront], None],
        limit: Callable[[], float],
        code: CommittedCode,
        kept: KeptMemory | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[EngineInfo] = loop.create_future()
        self.lost: asyncio.Future[EngineLost] = loop.create_future()
        self.link = Link(directory)
        self._directory = directory
        self._config = config
        self._code = code
        self._on_starting = on_starting
        self._take = take
        self._kept = kept
        self._ranks = Ranks(directory, config.parallel.tensor_parallel_size, self._on_exit, command, kept)
        self._judge = Judge(config.parallel.tensor_parallel_size, limit, self._ranks.pid)
        self._victims: set[int | None] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin: make the directory, listen, and start the processes.

        Raises:
            ResourceError: when the directory's path is too long for a socket, or the machine has no room.
        """
        try:
            self._directory.mkdir()
            (self._directory / "config.json").write_bytes(msgspec.json.encode(self._config))
            self._code.write(self._directory)
        except OSError as error:
            reason = error.strerror or error
            raise ResourceError(f"{self._directory} cannot be written ({reason}); make room there") from error
        self.link.open()
        self._tasks = [asyncio.create_task(work()) for work in (self._receive, self._hear, self._watch)]
        await self._ranks.start()

    async def until_ready(self) -> EngineInfo:
        """Wait until the ranks serve.

        Raises:
            EngineLost: when one cannot go on, or does not get on.
        """
        await self._first(self.ready)
        if self.lost.done():
            raise self.lost.result()
        return self.ready.result()

    async def until_lost(self) -> EngineLost:
        """Wait until a rank cannot go on."""
        await self._first()
        return self.lost.result()

    async def join(self, timeout: float) -> None:
        """Let the processes leave for `timeout` seconds, then kill them. Raises as `Ranks.join` does."""
        await self._ranks.join(timeout)

    async def end(self) -> Work:
        """Kill what is left and remove every trace; what the ranks worked on. Raises as `Ranks.join` does."""
        await self._ranks.kill()
        if self._kept is not None:
            self._kept.hang_up()
        if self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
            self._tasks.clear()
            self.link.close()
        work = read_work(self._directory, self._config.parallel.tensor_parallel_size)
        shutil.rmtree(self._directory, ignore_errors=True)
        return work

    async def _first(self, *others: asyncio.Future[EngineInfo]) -> None:
        """Wait for the loss or for one of `others`; a fault of the front is raised."""
        waited: list[asyncio.Future[Any]] = [*self._tasks, self.lost, *others]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task.done():
                task.result()

    async def _receive(self) -> None:
        while True:
            try:
                self._dispatch(await self.link.receive())
            except msgspec.DecodeError as error:
                # Edited code may compute what a message cannot hold, such as ids that are no whole numbers.
                self._lose(EngineLost(f"rank 0 sent what is no message ({error})", rank=0))

    async def _hear(self) -> None:
        while True:
            # Without its sign a rank is judged by the ones before and behind it.
            with contextlib.suppress(msgspec.DecodeError):
                self._judge.hear(await self.link.sign())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            error = self._judge.look()
            if error is not None and not self.lost.done():
                self._lose(error if self.ready.done() else in_start(error))

    def _dispatch(self, message: ToFront) -> None:
        match message:
            case Starting():
                self._on_starting(message)
            case Ready():
                if not self.ready.done():
                    self.ready.set_result(message.info)
            case Failed():
                self._on_failed(message)
            case _ if self.lost.done():
                pass  # the others speak on until they are killed
            case _:
                self._take(message)

    def _on_failed(self, message: Failed) -> None:
        error = EngineLost(message.message, rank=message.rank, exit_code=message.exit_code)
        if message.is_victim:
            self._victims.add(message.rank)
            asyncio.get_running_loop().call_later(VICTIM_GRACE, self._lose, error)
        else:
            self._lose(error)

    def _on_exit(self, error: EngineLost) -> None:
        if error.rank not in self._victims:
            self._lose(error)

    def _lose(self, error: EngineLost) -> None:
        self._ranks.expect_exit()
        if not self.lost.done():
            self.lost.set_result(error if error.file else self._judge.place(error))
