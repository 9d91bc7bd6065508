"""A driver of Triton that stands for a Hopper GPU: kernels are compiled for it and loaded, and launches are noted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

SHARED_MEMORY = 227 * 1024
"""Bytes that one block may have on Hopper."""


class Hopper:
    """In the place of `triton.runtime.driver.active`. `launches` are the CUfunction, grid and arguments of each."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, tuple[int, ...], tuple[Any, ...]]] = []
        self.utils = self
        self._loaded = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Module, CUfunction, registers, spills, most threads."""
        self._loaded += 1
        return self._loaded, self._loaded, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """What launches kernels of one specialisation."""

        def launch(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            _, described, enter, leave, *args = rest
            for hook in (enter, leave):
                if hook is not None:
                    hook(described)
            self.launches.append((function, (x, y, z), tuple(args)))

        return launch


@contextmanager
def hopper() -> Iterator[Hopper]:
    """Within it kernels are compiled for Hopper."""
    driver = Hopper()
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(driver)
    try:
        yield driver
    finally:
        triton.runtime.driver._active = before
