"""The life of the front process: listen, start the ranks, serve, drain, end."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from tokenspeed.errors import ModelError, RequestError, TokenSpeedError
from tokenspeed.runtime.config import Config, SchedulerOptions
from tokenspeed.runtime.protocol.calls import Reload
from tokenspeed.runtime.protocol.reports import Starting
from tokenspeed.runtime.protocol.state import EngineInfo
from tokenspeed.server.client import EngineClient
from tokenspeed.server.control import ControlApp, ControlServer
from tokenspeed.server.engine import Engine
from tokenspeed.server.errors import EngineUnavailable
from tokenspeed.server.grammars import GrammarCompiler
from tokenspeed.server.info import Description
from tokenspeed.server.metrics import Metrics
from tokenspeed.server.ranks import RANK_COMMAND
from tokenspeed.server.reloads import Body, ReloadRequest, Reloads
from tokenspeed.server.requests import Intake
from tokenspeed.server.service import GrpcServer, SchedulerServicer
from tokenspeed.server.status import StatusPipe
from tokenspeed.server.stops import TokenizerFile

log = logging.getLogger("tokenspeed.server")

RANKS_EXIT_TIMEOUT = 10.0
"""Seconds that the ranks get to leave after `Stop`."""

LAST_WORDS = 1.0
"""Seconds that failed calls get to reach their clients before the process ends."""


class Front:
    """One engine's front. `run` is its whole life."""

    def __init__(self, config: Config, run_dir: Path, status: StatusPipe, rank_command: Sequence[str]) -> None:
        self._config = config
        self._run_dir = run_dir
        self._status = status
        self._rank_command = rank_command

    async def run(self) -> int:
        """Serve until told to stop or until the engine is lost; returns the exit code."""
        self._build()
        async with AsyncExitStack() as closing:
            try:
                await self._listen(closing)
                self._serving = asyncio.create_task(self._engine.run())
                closing.push_async_callback(self._end_engine)
                self._services.append(self._serving)
                if await self._until_ready():
                    await self._first(asyncio.create_task(self._stop.wait()))
                    await self._drain()
            except TokenSpeedError as error:
                return await self._fail(error)
            except Exception as error:
                return await self._fail(unexpected(error))
        return 0

    def _build(self) -> None:
        config, loop = self._config, asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = loop.create_future()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._description: Description | None = None
        name = config.model.served_model_name or config.model.model
        metrics = Metrics(name)
        self._metrics = metrics
        self._reloads = Reloads(self._send_reload, self._on_reloaded)
        self._client = EngineClient(
            metrics,
            most_open=most_open(config.scheduler),
            report_generation=config.serve.report_generation,
            size=config.parallel.tensor_parallel_size,
            patience=config.serve.health_timeout,
            on_reload_status=self._reloads.take,
        )
        self._engine = Engine(config, self._run_dir, self._client, self._rank_command, self._on_starting)
        self._grammars = GrammarCompiler(self._client.load_grammars)
        self._scheduler = SchedulerServicer(self._client, self._grammars)
        self._grpc = GrpcServer(self._scheduler)
        self._control = ControlServer(config.control)
        self._app = ControlApp(
            self._client,
            self._reloads,
            metrics,
            self._server_info,
            allow_reload=config.reload.allow_reload_forward,
        )
        self._services: list[asyncio.Task[None]] = []
        self._watching: list[asyncio.Task[None]] = []

    async def _listen(self, closing: AsyncExitStack) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal)
        self._status.watch(self._on_parent_gone)
        self._control_url = self._control.bind()
        self._services.append(self._control.start(self._app.build()))
        closing.push_async_callback(self._control.stop)
        closing.push_async_callback(self._grammars.close)
        self._grpc_port = await self._grpc.start()
        closing.push_async_callback(self._grpc.stop, LAST_WORDS)
        where = f"gRPC on 127.0.0.1:{self._grpc_port}, control on {self._control_url}"
        self._on_starting(Starting(phase="listen", detail=where))

    async def _until_ready(self) -> bool:
        """True once the engine is ready, False when a stop came first."""
        await self._first(self._engine.info, asyncio.create_task(self._stop.wait()))
        if self._stop.is_set():
            return False
        info: EngineInfo = self._engine.info.result()
        self._metrics.started(info)
        self._description = Description(self._config, info, self._control_url)
        tokenizer_file = TokenizerFile(info.tokenizer_path)
        self._grammars.open(info)
        intake = Intake(info, self._config.model.seed, most_open(self._config.scheduler))
        self._scheduler.open(self._description, intake, tokenizer_file)
        await self._grpc.set_serving(True)
        self._status.send(
            "ready",
            grpc_port=self._grpc_port,
            control_url=self._control_url,
            info=msgspec.to_builtins(info),
        )
        self._watching = [asyncio.create_task(work) for work in (self._client.keep_asking(), self._watch_health())]
        self._services.extend(self._watching)
        self._reading = asyncio.create_task(self._read_tokenizer(tokenizer_file))
        log.info("ready: %s, %d KV blocks of %d tokens", info.model_path, info.num_blocks, info.block_size)
        return True

    async def _watch_health(self) -> None:
        """Have the standard health service say what `HealthCheck` says."""
        healthy = True
        while True:
            await asyncio.sleep(self._client.progress.interval)
            try:
                self._client.check_health()
            except EngineUnavailable as error:
                if healthy:
                    log.warning("not healthy: %s", error)
                healthy = False
            else:
                if not healthy:
                    log.warning("healthy again")
                healthy = True
            if not self._stop.is_set():
                await self._grpc.set_serving(healthy)

    async def _read_tokenizer(self, file: TokenizerFile) -> None:
        """Read it while the gateway starts, which would try a damaged one for a minute."""
        try:
            await file.load()
        except RequestError:
            return  # a tokenizer of another form: only stop strings need this one
        except ModelError as error:
            if not self._failed.done():
                self._failed.set_exception(error)

    async def _drain(self) -> None:
        """Let open requests and calls finish, then ask the ranks to leave."""
        await self._grpc.set_serving(False)
        self._client.refuse(EngineUnavailable("the server is stopping; send the request to another one"))
        timeout = 0.0 if self._hurry.is_set() else self._config.serve.drain_timeout
        log.info("stopping: %d request(s) get up to %g s to finish", len(self._client.journal), timeout)
        await self._first(
            asyncio.create_task(self._client.drained()),
            asyncio.create_task(self._hurry.wait()),
            timeout=timeout,
        )
        await self._stop_serving()
        self._client.fail(EngineUnavailable("the server stopped before this request was finished"))
        await self._engine.stop(0 if self._hurry.is_set() else RANKS_EXIT_TIMEOUT)

    async def _stop_serving(self) -> None:
        """From here on a loss is none."""
        self._serving.cancel()
        await asyncio.wait([self._serving])

    async def _end_engine(self) -> None:
        for task in self._watching:
            task.cancel()
        await self._stop_serving()
        await self._engine.end()

    async def _fail(self, error: TokenSpeedError) -> int:
        """End every open request and call, and tell the parent why; the exit code."""
        await self._grpc.set_serving(False)
        reason = error if isinstance(error, EngineUnavailable) else EngineUnavailable(str(error))
        self._client.fail(reason)
        report(self._status, error)
        return error.exit_code

    async def _first(self, *waiters: asyncio.Future[Any], timeout: float | None = None) -> None:
        """Wait for the first of `waiters` or for `timeout`; the loss of the engine is raised."""
        await asyncio.wait(
            [self._failed, *self._services, *waiters], timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
        for waiter in waiters:
            if isinstance(waiter, asyncio.Task):
                waiter.cancel()
        for ended in (self._failed, *self._services):
            if ended.done():
                ended.result()

    # ---- what others tell the front ----

    def _on_starting(self, message: Starting) -> None:
        log.info("starting: %s %s", message.phase, message.detail)
        self._status.send("starting", phase=message.phase, detail=message.detail)

    def _on_reloaded(self, body: Body) -> None:
        """Tell the outcome where the server's other messages are: who asked may be somewhere else."""
        self._metrics.reloaded(body)
        summary = " ".join(str(body.get("message") or body.get("error")).split())
        if body.get("success"):
            log.info("reload %s: %s", body.get("id"), summary)
        else:
            log.warning("reload %s: not reloaded: %s", body.get("id"), summary)

    def _on_stop_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def _on_parent_gone(self) -> None:
        self._hurry.set()
        self._stop.set()

    async def _send_reload(self, request: ReloadRequest) -> Body:
        return await self._client.call(
            Reload,
            id=request.id,
            mode=request.mode,
            modules=request.modules,
            timeout_s=request.timeout_s,
            by=request.by,
        )

    def _server_info(self) -> Body:
        if self._description is None:
            return {"state": "starting", "server_args": {"rl.control_url": self._control_url}}
        return self._description.as_json(self._client.loads, self._reloads.generation)


def most_open(options: SchedulerOptions) -> int | None:
    """How many answers may be owed at a time: those that run and those that may wait."""
    return None if options.max_queued_requests is None else options.max_num_seqs + options.max_queued_requests


def report(status: StatusPipe, error: TokenSpeedError) -> None:
    """Tell the parent what ends this process; it prints the sentence, so that is logged only without a parent."""
    if not status.send("failed", message=str(error), exit_code=error.exit_code):
        log.error("%s", error)


def unexpected(error: Exception) -> TokenSpeedError:
    """A fault of ours as one sentence, called where it is handled; its traceback goes to the log."""
    log.exception("the front cannot go on")
    return TokenSpeedError(f"the front failed: {type(error).__name__}: {error}; its traceback is above")


def main(arguments: Sequence[str] | None = None, rank_command: Sequence[str] = RANK_COMMAND) -> int:
    """Read the arguments and the configuration, and run the front; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tokenspeed.server", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="private directory with config.json")
    parser.add_argument("--status-fd", type=int, help="pipe that gets one JSON line an event")
    options = parser.parse_args(arguments)
    faulthandler.register(signal.SIGUSR1)
    status = StatusPipe(options.status_fd)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        config = msgspec.json.decode((options.run_dir / "config.json").read_bytes(), type=Config)
        logging.getLogger().setLevel(config.serve.log_level.upper())
        return asyncio.run(Front(config, options.run_dir, status, rank_command).run())
    except Exception as error:
        # Outside of `run`'s own care: the configuration, or what closes at the end.
        report(status, unexpected(error))
        return 1
