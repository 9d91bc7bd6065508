"""Memory of the ranks that outlives them: the front holds its file descriptors, and nothing else of it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tokenspeed.runtime.protocol.keeping import ASK, DONE, DROP, KEEP, receive, send


class KeptMemory:
    """What each of `size` ranks has left for the rank that may have to replace it: the memory of its weights.

    No process of its own holds it, which could end alone: it lasts for as long as this one, which no edit reaches.
    """

    def __init__(self, size: int) -> None:
        self._kept: list[list[int]] = [[] for _ in range(size)]
        self._connections: list[socket.socket] = []

    @contextmanager
    def connect(self, rank: int) -> Iterator[socket.socket]:
        """The end of a connection for the process of `rank`, which has to inherit it within the block."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._connections.append(ours)
        asyncio.get_running_loop().add_reader(ours, self._on_message, ours, rank)
        with theirs:
            yield theirs

    def hang_up(self) -> None:
        """Hear no more from the ranks that were connected; what they left stays."""
        for connection in self._connections:
            asyncio.get_running_loop().remove_reader(connection)
            connection.close()
        self._connections.clear()

    def close(self) -> None:
        """Hang up, and give all memory back."""
        self.hang_up()
        for rank in range(len(self._kept)):
            self._drop(rank)

    def _on_message(self, connection: socket.socket, rank: int) -> None:
        # A rank may end at any point of a conversation.
        message = b""
        descriptors: list[int] = []
        with suppress(OSError):
            message, descriptors = receive(connection)
        if not message:
            asyncio.get_running_loop().remove_reader(connection)
            return
        if message in (KEEP, DROP):
            self._drop(rank)
            self._kept[rank] = descriptors
        with suppress(OSError):
            send(connection, DONE, self._kept[rank] if message == ASK else ())

    def _drop(self, rank: int) -> None:
        for descriptor in self._kept[rank]:
            os.close(descriptor)
        self._kept[rank] = []
