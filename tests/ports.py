"""Ports for programs that have to be told one."""

from __future__ import annotations

import random
import socket

CHOICE = range(20000, 32000)
"""Below the ports that the kernel gives to connections, so that none of these takes one before its program does."""


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    while True:
        port = random.SystemRandom().choice(CHOICE)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
