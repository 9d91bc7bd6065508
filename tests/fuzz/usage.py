"""What the processes of a server hold: memory, files and threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

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


EVERY = 100
"""Edits between two figures of memory."""

MOST_PER_100 = 8 * 2**20
"""Bytes by which a process may grow with each hundred edits, once its caches are full."""


@dataclass
class Life:
    """The memory of one process after each edit that it lived through, in bytes."""

    role: str
    pid: int
    first: int
    """Which edit, counted from the first of the campaign, it saw first."""
    rss: list[int] = field(default_factory=list)

    @property
    def per_100(self) -> float | None:
        """Bytes by which it grew with each hundred edits, between its second fifth and its last; None if it was short.

        Medians, since what a single step takes comes and goes.
        """
        fifth = len(self.rss) // 5
        if len(self.rss) < 2 * EVERY:
            return None
        grown = median(self.rss[-fifth:]) - median(self.rss[fifth : 2 * fifth])
        return grown * EVERY / (len(self.rss) - 2 * fifth)

    @property
    def is_flat(self) -> bool:
        """Whether it grew no more than it may, as far as can be told."""
        return self.per_100 is None or self.per_100 <= MOST_PER_100

    def figures(self) -> dict[str, Any]:
        """At its start, each hundred edits, and at its end, in MiB."""
        samples = [*self.rss[::EVERY], self.rss[-1]]
        grown = None if self.per_100 is None else round(self.per_100 / 2**20, 2)
        return {
            "role": self.role,
            "edits": f"{self.first} to {self.first + len(self.rss) - 1}",
            "rss_mib": [round(sample / 2**20) for sample in samples],
            "mib_per_100_edits": grown,
        }


def lives(usages: Sequence[dict[str, Usage]]) -> list[Life]:
    """The life of each process that was seen, in the order in which they came."""
    found: dict[tuple[str, int], Life] = {}
    for number, seen in enumerate(usages):
        for role, now in sorted(seen.items()):
            found.setdefault((role, now.pid), Life(role, now.pid, number)).rss.append(now.rss)
    return list(found.values())
