"""The sockets between the front and one set of ranks."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tokenspeed.errors import ResourceError
from tokenspeed.runtime.protocol.calls import ToEngine
from tokenspeed.runtime.protocol.reports import ToFront
from tokenspeed.runtime.protocol.state import Sign

log = logging.getLogger(__name__)

LONGEST_SOCKET_PATH = 107
"""Bytes of a Unix socket's address on Linux."""


class Link:
    """Messages in both directions and the ranks' signs of life, through sockets in `directory`.

    What is left in them when it closes is lost.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)
        self._sign_decoder = msgspec.msgpack.Decoder(Sign)

    def open(self) -> None:
        """Open the sockets; the ranks may connect later.

        Raises:
            ResourceError: when the directory's path is too long for a socket.
        """
        addresses = [bind_address(self._directory, name) for name in ("to_rank0", "from_rank0", "signs")]
        self._context = zmq.Context()
        self._to_rank0 = self._context.socket(zmq.PUSH)
        shadow = zmq.asyncio.Context(self._context)
        self._from_ranks, self._signs = shadow.socket(zmq.PULL), shadow.socket(zmq.PULL)
        self._sockets: tuple[zmq.Socket[Any], ...] = (self._to_rank0, self._from_ranks, self._signs)
        for socket, address in zip(self._sockets, addresses, strict=True):
            # No high-water mark: a send never blocks the loop, and nothing is dropped.
            socket.set_hwm(0)
            socket.linger = 0
            socket.bind(address)

    def close(self) -> None:
        """Close what `open` opened."""
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()

    def send(self, message: ToEngine) -> None:
        """Pass a message to rank 0; nothing happens when it is gone, or when this is closed."""
        if self._to_rank0.closed:
            return
        try:
            self._to_rank0.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            # Rank 0 has hung up; its exit is noticed by the one who started it.
            log.debug("rank 0 is gone, %s was not sent", type(message).__name__)

    async def sign(self) -> Sign:
        """The next sign of life of any rank."""
        return self._sign_decoder.decode(await self._signs.recv())

    async def receive(self) -> ToFront:
        """The next message of any rank."""
        return self._decoder.decode(await self._from_ranks.recv())


def bind_address(run_dir: Path, name: str) -> str:
    """Address of one of the sockets between front and ranks.

    Raises:
        ResourceError: when the run directory's path is too long for a socket.
    """
    path = run_dir / name
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise ResourceError(f"the path {path} is too long for a socket; set TMPDIR to a shorter directory")
    return f"ipc://{path}"
