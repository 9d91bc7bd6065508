"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

PATIENCE = 240.0
"""Seconds that anything may take that has to come. Far more than it does, since a busy machine is slow."""


def until(condition: Callable[[], Value], what: Callable[[], str] = lambda: "it never came true") -> Value:
    """Wait for `condition` and return its value; an AssertionError that says `what` when it stays false."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)
    return value
