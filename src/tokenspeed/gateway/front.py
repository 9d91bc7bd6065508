"""The engine's front process as its parent sees it: how it is started, and what it reports."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from tokenspeed.errors import TokenSpeedError
from tokenspeed.gateway.child import Child

logger = logging.getLogger(__name__)

FRONT_COMMAND = (sys.executable, "-m", "tokenspeed.server")

STOP_PATIENCE = 5.0
"""Seconds that a front gets to end its ranks when the start or another process failed."""


class Starting(msgspec.Struct, tag="starting", tag_field="event"):
    """Progress of the start-up."""

    phase: str
    detail: str = ""


class Ready(msgspec.Struct, tag="ready", tag_field="event"):
    """The engine serves."""

    grpc_port: int
    control_url: str
    info: dict[str, Any] = {}


class Failed(msgspec.Struct, tag="failed", tag_field="event"):
    """The front is about to end with `exit_code`."""

    message: str
    exit_code: int = 1


Event = Starting | Ready | Failed


class EngineFailed(TokenSpeedError):
    """The engine said why it cannot go on, and with what exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Front:
    """A started front process and the lines that it writes to its status descriptor."""

    def __init__(self, child: Child, lines: asyncio.StreamReader) -> None:
        self.child = child
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._lines = lines
        self._decoder = msgspec.json.Decoder(Event)

    async def watch(self) -> NoReturn:
        """Follow the front: resolve `ready`, and raise when it ends.

        Raises:
            TokenSpeedError: with the reason that the front gave, or how it ended when it gave none.
        """
        while line := await self._lines.readline():
            match self._decoder.decode(line):
                case Starting(phase=phase, detail=detail):
                    logger.debug("the engine is starting: %s %s", phase, detail)  # it logs this itself
                case Ready() as ready:
                    self.ready.set_result(ready)
                case Failed(message=message, exit_code=exit_code):
                    raise EngineFailed(message, exit_code)
        raise TokenSpeedError(f"{self.child.name} {await self.child.how_it_ended()}; see its messages above")


@asynccontextmanager
async def started_front(run_dir: Path, command: Sequence[str] = FRONT_COMMAND) -> AsyncIterator[Front]:
    """Start the front on `run_dir`, where config.json lies; nothing of it is left afterwards."""
    read_end, write_end = os.pipe()
    lines = asyncio.StreamReader()
    pipe = os.fdopen(read_end, "rb")
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), pipe)
    try:
        try:
            arguments = ["--run-dir", str(run_dir), "--status-fd", str(write_end)]
            child = await Child.start(
                "the engine", [*command, *arguments], stdout=sys.stderr.fileno(), pass_fds=[write_end]
            )
        finally:
            os.close(write_end)
        try:
            yield Front(child, lines)
        finally:
            # A front that failed is about to end by itself, and takes its ranks along.
            await child.stop(STOP_PATIENCE)
            await child.kill()
    finally:
        transport.close()
