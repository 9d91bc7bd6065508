"""Waiting for what other processes do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

Value = TypeVar("Value")

PATIENCE = 240.0
"""Seconds that anything may take that has to come. Far more than it does, since a busy machine is slow."""

GRACE_S = 30.0
"""Seconds that other processes get once one has failed, for which they may wait for ever."""


def until(condition: Callable[[], Value], what: Callable[[], str] = lambda: "it never came true") -> Value:
    """Wait for `condition` and return its value; an AssertionError that says `what` when it stays false."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)
    return value


def gather(
    processes: Sequence[BaseProcess], ends: Sequence[Connection], failed: Callable[[Any], object]
) -> dict[int, Any]:
    """The message of each process, by its index, from its end of a pipe; those that say nothing in time are missing.

    These write their stacks, if they have registered faulthandler for SIGUSR1.
    """
    told: dict[int, Any] = {}
    deadline = time.monotonic() + PATIENCE
    while len(told) < len(ends) and (left := deadline - time.monotonic()) > 0:
        for end in wait([end for index, end in enumerate(ends) if index not in told], left):
            assert isinstance(end, Connection)
            message = told[ends.index(end)] = end.recv()
            if failed(message):
                deadline = min(deadline, time.monotonic() + GRACE_S)
    for index in range(len(ends)):
        pid = processes[index].pid
        if index not in told and pid is not None:
            os.kill(pid, signal.SIGUSR1)
            time.sleep(1)
    return told
