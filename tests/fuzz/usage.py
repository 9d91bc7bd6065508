"""What the processes of a server hold: memory, files and threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from tests.e2e.harness import Server


@dataclass(frozen=True)
class Usage:
    """Of one process."""

    pid: int
    rss: int
    """Bytes."""
    fds: int
    threads: int


def usage(server: Server) -> dict[str, Usage]:
    """By role: front, rank 0, rank 1, …; the gateway is left out, since it is another project's."""
    found = {}
    for pid, line in server.processes().items():
        role = "front" if "tokenspeed.server" in line else ""
        if "tokenspeed.rank" in line:
            role = "rank " + line.split("--rank ")[1].split()[0]
        if role:
            process = psutil.Process(pid)
            with process.oneshot():
                found[role] = Usage(pid, process.memory_info().rss, process.num_fds(), process.num_threads())
    return found


@dataclass
class Growth:
    """How a process grew."""

    role: str
    rss: int
    fds: int
    threads: int


def growth(usages: Sequence[dict[str, Usage]]) -> list[Growth]:
    """Of each process that lives at the end, since it was first seen."""
    grown = []
    for role, now in sorted(usages[-1].items()) if usages else ():
        was = next(seen[role] for seen in usages if role in seen and seen[role].pid == now.pid)
        grown.append(Growth(role, now.rss - was.rss, now.fds - was.fds, now.threads - was.threads))
    return grown
