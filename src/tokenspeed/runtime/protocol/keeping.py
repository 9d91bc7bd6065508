"""How a rank leaves memory with the front, which keeps it beyond the rank's end.

Each rank has one end of a Unix socket. It sends one byte, `ASK`, `KEEP` or `DROP`, and the front answers `DONE`. What
is kept are file descriptors, sent beside the byte: memory lives as long as somebody holds its descriptor, whatever
becomes of the process that made it. The front never looks into it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

ASK = b"?"
"""For what ranks before this one left: `DONE` comes with their descriptors, in the order in which they came."""
KEEP = b"+"
"""These descriptors from here on, instead of any others."""
DROP = b"-"
"""What is kept, so that its memory is free once the rank has let go of it too."""
DONE = b"."

MOST_DESCRIPTORS = 64
"""That a rank may leave; a message of the system's takes no more than 253."""


def send(connection: socket.socket, message: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send one byte, and copies of `descriptors`.

    Raises:
        OSError: the other side is gone.
    """
    socket.send_fds(connection, [message], descriptors)


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """The next byte and the descriptors that came with it, which are the caller's to close; no byte from one who has
    left."""
    message, descriptors, _, _ = socket.recv_fds(connection, 1, MOST_DESCRIPTORS)
    return message, descriptors
