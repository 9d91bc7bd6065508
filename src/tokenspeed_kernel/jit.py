"""Counts the kernels that are compiled while one looks on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from tokenspeed_kernel.progress import PROGRESS


@dataclass(eq=False)
class JitCount:
    """Kernels compiled, and the seconds that took; hits of a disk cache are not counted."""

    compiled: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one; several threads may compile."""
        with _ADDING:
            self.compiled += 1
            self.seconds += seconds


_ADDING = threading.Lock()
_COUNTS: list[JitCount] = []
"""Of those who look on."""
_NOTED: WeakSet[Any] = WeakSet()


@contextmanager
def count_compiles() -> Iterator[JitCount]:
    """Count within the context what Triton compiles, and what `note_compile` is told of."""
    count = JitCount()
    _COUNTS.append(count)
    try:
        with _listening_to_triton(count):
            yield count
    finally:
        _COUNTS.remove(count)


def note_compile(compiled: Any, seconds: float) -> None:
    """Tell those who count that `compiled` was made; for compilers that tell nobody themselves."""
    PROGRESS.step("compiled a kernel")
    _NOTED.add(compiled)
    for count in _COUNTS:
        count.add(seconds)


def noted() -> list[Any]:
    """What `note_compile` was told of and somebody uses. Freeing it may unload its code, which a graph launches."""
    return list(_NOTED)


@contextmanager
def _listening_to_triton(count: JitCount) -> Iterator[None]:
    """Triton has one slot for a listener: an earlier one is called on and put back at the end."""
    triton = sys.modules.get("triton")
    if triton is None:
        yield
        return
    knobs: Any = triton.knobs.compilation
    earlier = knobs.listener

    def listener(*, times: Any, cache_hit: bool, **rest: Any) -> None:
        PROGRESS.step("compiled a kernel")
        if not cache_hit:
            count.add(times.total / 1e6)
        if earlier is not None:
            earlier(times=times, cache_hit=cache_hit, **rest)

    knobs.listener = listener
    try:
        yield
    finally:
        knobs.listener = earlier
