"""The engine behind the front: one set of ranks after the other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tokenspeed.errors import TokenSpeedError
from tokenspeed.runtime.config import Config
from tokenspeed.runtime.protocol.reports import Starting
from tokenspeed.runtime.protocol.state import EngineInfo
from tokenspeed.server.client import EngineClient
from tokenspeed.server.errors import EngineLost
from tokenspeed.server.incarnation import Incarnation
from tokenspeed.server.kept import KeptMemory

log = logging.getLogger(__name__)

SLOW_TIMEOUT = 600.0
"""Seconds that ranks may stand still while they write a profile, where little is passed on the way."""

TRIES = 2
"""Times that a set of ranks is started to replace a lost one."""

MOST_IDLE = 5
"""Sets of ranks in a row that may be lost before they were asked for anything: there is no request or call to blame."""


class Engine:
    """Keeps ranks at work for `client`: when one is lost all are killed, and a new set takes over what is owed.

    `info` is done when the first set is ready. `on_starting` is called with each report of the first start.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        client: EngineClient,
        command: Sequence[str],
        on_starting: Callable[[Starting], None],
    ) -> None:
        self.info: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._config = config
        self._run_dir = run_dir
        self._client = client
        self._command = command
        self._on_starting = on_starting
        self._started = 0
        self._idle = 0
        """Sets of ranks that were lost in a row without having done anything."""
        self._current: Incarnation | None = None
        self._kept = KeptMemory(config.parallel.tensor_parallel_size) if config.reload.allow_reload_forward else None

    async def run(self) -> None:
        """Start a set of ranks, and another one whenever one is lost.

        Raises:
            EngineLost: when the first set does not start, or none could be had again.
            TokenSpeedError: for what else stands against a start.
        """
        incarnation = self._begin(self._config, self._on_starting)
        await incarnation.start()
        info = await incarnation.until_ready()
        config = pinned(self._config, info)
        self._client.serve(incarnation.link)
        self.info.set_result(info)
        while True:
            lost = await incarnation.until_lost()
            incarnation = await self._replace(incarnation, lost, config)

    async def stop(self, patience: float) -> None:
        """Ask the ranks to leave, and kill them after `patience` seconds; `run` must have been cancelled."""
        if self._current is not None:
            self._client.stop()
            # Who is still starting hears nothing.
            await self._current.join(patience if self._current.ready.done() else 0)

    async def end(self) -> None:
        """Leave no process and no file behind; `run` must have been cancelled."""
        if self._current is not None:
            await self._current.end()
        if self._kept is not None:
            self._kept.close()

    def _begin(self, config: Config, on_starting: Callable[[Starting], None]) -> Incarnation:
        directory = self._run_dir / str(self._started)
        self._started += 1
        client = self._client
        self._current = Incarnation(
            directory, config, self._command, on_starting, client.take, self._limit, client.code, self._kept
        )
        return self._current

    def _limit(self) -> float:
        """Seconds that the ranks may stand still now; 0 is for ever."""
        if self._current is None or not self._current.ready.done():
            return self._config.serve.start_timeout
        if self._client.reloading:
            return self._config.reload.reload_rank_timeout
        step = self._config.serve.step_timeout
        return max(step, SLOW_TIMEOUT) if step and self._client.slow else step

    async def _replace(self, dead: Incarnation, lost: EngineLost, config: Config) -> Incarnation:
        """Ranks that serve in place of those of `dead`.

        Raises:
            EngineLost: when they do not start, or do not stay whatever they are asked.
        """
        where = f" at {lost.file}:{lost.line}" if lost.file else ""
        log.warning("%s%s; the ranks are replaced, %d request(s) are kept", lost, where, len(self._client.journal))
        begun = time.monotonic()
        self._idle = 0 if self._client.lose(lost, await dead.end()) else self._idle + 1
        if self._idle == MOST_IDLE:
            sentence = f"{lost}; {MOST_IDLE} sets of ranks in a row were lost before they had anything to do"
            raise EngineLost(sentence, rank=lost.rank, exit_code=lost.exit_code)
        failures: list[TokenSpeedError] = []
        while len(failures) < TRIES:
            incarnation = self._begin(config, _log_starting)
            try:
                await incarnation.start()
                info = await incarnation.until_ready()
            except TokenSpeedError as error:
                log.warning("the ranks could not be started again: %s", error)
                failures.append(error)
                await incarnation.end()
            else:
                self._client.serve(incarnation.link)
                log.warning(
                    "the ranks were replaced in %.1f s, %d request(s) go on; %s; %s",
                    time.monotonic() - begun,
                    len(self._client.journal),
                    "their weights were kept" if info.weights_kept else "their weights were loaded anew",
                    ", ".join(f"{name} {seconds:.1f} s" for name, seconds in info.startup.items()),
                )
                return incarnation
        last = failures[-1]
        raise EngineLost(
            f"{lost}; the ranks could not be started again: {last}", rank=lost.rank, exit_code=last.exit_code
        )


def pinned(config: Config, info: EngineInfo) -> Config:
    """The configuration of the ranks to come, which serve the very model that the first ones found, in as many blocks:
    what fitted into the engine once fits again."""
    return replace(
        config,
        model=replace(config.model, model=info.model_path, revision=None),
        cache=replace(config.cache, max_total_tokens=info.num_blocks * info.block_size),
    )


def _log_starting(message: Starting) -> None:
    log.debug("starting again: %s %s", message.phase, message.detail)
