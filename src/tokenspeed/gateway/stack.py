"""`ts serve`: the engine and the gateway as child processes, from the first check to the last kill."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from tokenspeed.errors import ConfigError, TokenSpeedError
from tokenspeed.gateway.child import Child
from tokenspeed.gateway.front import FRONT_COMMAND, started_front
from tokenspeed.gateway.ports import LOOPBACK, Address, claim
from tokenspeed.gateway.rundir import private_directory
from tokenspeed.gateway.smg import require_smg, smg_command, smg_environment, started_smg, until_served
from tokenspeed.gateway.smg_flags import check_gateway_flags
from tokenspeed.gateway.stopping import StopAsked, Stopping
from tokenspeed.runtime.config import Config

logger = logging.getLogger(__name__)

GATEWAY_START_TIMEOUT = 60.0
"""Seconds that SMG gets from its start until it serves the engine's model."""

EXTRA_PATIENCE = 10.0
"""Seconds beyond --drain-timeout after which an engine that was asked to stop is killed."""

GATEWAY_PATIENCE = 5.0
"""Seconds after which SMG is killed, once the engine has drained."""

DEVELOPMENT_ONLY = (
    "warning: --allow-reload-forward is for development only; benchmark a final change on a freshly started server"
)

OPEN_TO_ALL = "warning: anyone who can reach this address can reload its code; give --api-key, or --host 127.0.0.1"

T = TypeVar("T")


def serve(config: Config, front_command: Sequence[str] = FRONT_COMMAND, gateway_flags: Sequence[str] = ()) -> int:
    """Serve until a signal asks for a stop; the exit code is 0 after an orderly one.

    `gateway_flags` are passed on to SMG.

    Raises:
        TokenSpeedError: when the start fails or a process ends that should not.
    """
    level = config.serve.log_level.upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    return asyncio.run(_serve(config, front_command, gateway_flags))


async def _serve(config: Config, front_command: Sequence[str], gateway_flags: Sequence[str]) -> int:
    with private_directory() as run_dir:
        try:
            await Stack(config, run_dir, front_command, gateway_flags).run()
        except StopAsked as stop:
            return 128 + stop.signum
    return 0


def public_host(config: Config) -> str:
    """The address to listen on: --host, or one that a server open to reloads can be trusted with."""
    if config.serve.host is not None:
        return config.serve.host
    unprotected = config.reload.allow_reload_forward and config.serve.api_key is None
    return LOOPBACK if unprotected else "0.0.0.0"


class Stack:
    """One engine and the gateway in front of it."""

    def __init__(
        self, config: Config, run_dir: Path, front_command: Sequence[str], gateway_flags: Sequence[str]
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._front_command = front_command
        self._gateway_flags = gateway_flags
        self._guards: list[asyncio.Task[NoReturn]] = []

    async def run(self) -> None:
        """Start everything, serve, and stop everything in order.

        Raises:
            StopAsked: when a signal came before the server was ready, or a second one cut the drain short.
            TokenSpeedError: when the start fails or a process ends that should not.
        """
        self._check()
        (self._run_dir / "config.json").write_bytes(msgspec.json.encode(self._config))
        stopping = Stopping()
        async with AsyncExitStack() as cleanup:
            cleanup.enter_context(stopping.handling_signals())
            cleanup.push_async_callback(self._drop_guards)
            self._guard(stopping.watch())
            front = await cleanup.enter_async_context(started_front(self._run_dir, self._front_command))
            stopping.children.append(front.child)
            self._guard(front.watch())
            ready = await self._unless_ended(front.ready)
            address = self._claim()  # again: the engine took its time to start, and another server may have come first
            metrics_port = claim(LOOPBACK, 0).port
            command = smg_command(self._config, address, ready.grpc_port, metrics_port, self._gateway_flags)
            smg = await cleanup.enter_async_context(started_smg(command, smg_environment(self._config)))
            stopping.children.append(smg)
            self._guard(_fail_at_end(smg, address))
            model = await self._unless_ended(self._until_served(address, ready.grpc_port))
            self._announce(model, address, ready.control_url)
            await self._until_stopped(front.child, smg)

    def _check(self) -> None:
        """Refuse what cannot work before a process is started."""
        overlay = self._config.reload.reload_overlay
        if overlay is not None and not Path(overlay).is_dir():
            raise ConfigError(f"--reload-overlay {overlay} is not a directory; create it or give another")
        port = self._config.serve.port
        if port == self._config.control.rl_control_port != 0:
            raise ConfigError(f"--port and --rl-control-port are both {port}; give two different ones")
        require_smg()
        if self._gateway_flags:
            check_gateway_flags(self._gateway_flags)
        self._claim()

    def _claim(self) -> Address:
        return claim(public_host(self._config), self._config.serve.port)

    async def _until_served(self, address: Address, grpc_port: int) -> str:
        served = until_served(address, grpc_port, self._config.serve.api_key)
        try:
            return await asyncio.wait_for(served, GATEWAY_START_TIMEOUT)
        except TimeoutError as error:
            message = f"the gateway (smg) did not serve the model within {GATEWAY_START_TIMEOUT:.0f} s"
            raise TokenSpeedError(f"{message}; run again with --log-level debug to see why") from error

    def _announce(self, model: str, address: Address, control_url: str) -> None:
        """Print the one ready line, and what a development server must say."""
        print(f"TokenSpeed is ready: {model} at {address.url}, metrics at {control_url}/metrics", flush=True)
        if self._config.reload.allow_reload_forward:
            print(DEVELOPMENT_ONLY, file=sys.stderr, flush=True)
            if not address.is_local and self._config.serve.api_key is None:
                print(OPEN_TO_ALL, file=sys.stderr, flush=True)

    async def _until_stopped(self, engine: Child, smg: Child) -> None:
        """Serve until a signal, then drain: the engine first, since SMG takes requests until it ends."""
        try:
            await self._unless_ended(asyncio.Event().wait())
        except StopAsked:
            logger.info("stopping: running requests get up to %g s", self._config.serve.drain_timeout)
            await self._drop_guards()
            drained = await engine.stop(self._config.serve.drain_timeout + EXTRA_PATIENCE)
            if not drained or await engine.ended() != 0:
                logger.warning("%s did not stop in order", engine.name)
                raise
            await smg.stop(GATEWAY_PATIENCE)

    def _guard(self, watch: Coroutine[Any, Any, NoReturn]) -> None:
        """From here on, whatever `watch` raises ends what `_unless_ended` waits for."""
        self._guards.append(asyncio.create_task(watch))

    async def _unless_ended(self, work: Awaitable[T]) -> T:
        """The result of `work`, unless a guard raises first."""
        task = asyncio.ensure_future(work)
        await asyncio.wait([task, *self._guards], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(*(guard for guard in self._guards if guard.done()))
        raise AssertionError("a guard ends only by raising")

    async def _drop_guards(self) -> None:
        for guard in self._guards:
            guard.cancel()
        await asyncio.gather(*self._guards, return_exceptions=True)
        self._guards.clear()


async def _fail_at_end(smg: Child, address: Address) -> NoReturn:
    """Wait for the end of SMG, which should not end, and raise.

    Raises:
        ResourceError: when another server listens at its address, which is why it ended.
        TokenSpeedError: in all other cases.
    """
    how = await smg.how_it_ended()
    claim(*address)
    raise TokenSpeedError(f"{smg.name} {how}; see its messages above")
