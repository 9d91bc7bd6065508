"""Counts the kernels that are compiled while one looks on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokenspeed_kernel.progress import PROGRESS


@dataclass
class JitCount:
    """Kernels compiled, and the seconds that took; hits of a disk cache are not counted."""

    compiled: int = 0
    seconds: float = 0.0


@contextmanager
def count_compiles() -> Iterator[JitCount]:
    """Count Triton's compiles within the context; zeros where Triton is not loaded.

    Triton has one slot for a listener: an earlier one is called on and put back at the end.
    """
    count = JitCount()
    triton = sys.modules.get("triton")
    if triton is None:
        yield count
        return
    knobs: Any = triton.knobs.compilation
    earlier = knobs.listener

    def listener(*, times: Any, cache_hit: bool, **rest: Any) -> None:
        PROGRESS.step("compiled a kernel")
        if not cache_hit:
            count.compiled += 1
            count.seconds += times.total / 1e6
        if earlier is not None:
            earlier(times=times, cache_hit=cache_hit, **rest)

    knobs.listener = listener
    try:
        yield count
    finally:
        knobs.listener = earlier
