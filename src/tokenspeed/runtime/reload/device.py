"""The GPU under code that is being tried: errors told of what made them, and memory given back when an edit fails."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import unwrap
from linecache import getline
from traceback import FrameSummary
from typing import Any

import torch

from tokenspeed.runtime.execution.executor import Executor
from tokenspeed.runtime.reload.fault import PlacedError
from tokenspeed_kernel.launch import recording
from tokenspeed_reload import chain_of, describe

MOST_GROWTH = 64 << 20
"""Bytes that failed captures may leave behind in the memory of the graphs, where others will use them again."""


class DeviceFault(PlacedError):
    """A launch of edited code that the device reported as wrong."""


class TrialDevice:
    """What a reload does with the device of `executor`; on a CPU nothing."""

    def __init__(self, executor: Executor):
        self.executor = executor
        self._reserved: int | None = None
        """Bytes that torch held when the code that serves began to, or less if it has given some back since."""

    @property
    def _is_gpu(self) -> bool:
        return self.executor.buffers.device.type == "cuda"

    def begin(self) -> None:
        """A reload begins."""
        if self._is_gpu:
            reserved = torch.cuda.memory_reserved(self.executor.buffers.device)
            self._reserved = reserved if self._reserved is None else min(reserved, self._reserved)

    def commit(self) -> None:
        """Other code serves from now on, with the memory that it takes."""
        self._reserved = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Wait for the device before and after each launch of the block, so that an error is told of its cause."""
        if self._is_gpu:
            with recording(_Watch(self.executor.synchronize)):
                yield
        else:
            yield

    def is_lost(self, error: BaseException) -> bool:
        """Whether the device does not work any more after `error`, in this process."""
        # Only what came from the device is reason to wait for it, where collectives may still wait for other ranks.
        if not self._is_gpu or isinstance(error, torch.OutOfMemoryError) or "CUDA" not in _texts(error):
            return False
        try:
            self.executor.synchronize()
        except RuntimeError:
            return True
        return False

    def regain(self) -> None:
        """Give back what the edit has taken; it is undone."""
        if not self._is_gpu:
            return
        gc.collect()
        torch.cuda.empty_cache()
        assert self._reserved is not None
        if torch.cuda.memory_reserved(self.executor.buffers.device) - self._reserved > MOST_GROWTH:
            # Blocks in a pool that graphs hold go with all of these graphs only.
            self.executor.recapture()
            gc.collect()
            torch.cuda.empty_cache()


class _Watch:
    """A recorder of launches that keeps none of them."""

    def __init__(self, synchronize: Callable[[], None]):
        self._synchronize = synchronize

    def launch(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the launch, and wait for the device before it and after it."""
        self._synchronize()
        result = function(*args, **kwargs)
        try:
            self._synchronize()
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
            raise DeviceFault(f"{type(error).__name__}: {cause} in the launch {name}", definition(function)) from error
        return result


def definition(function: Any) -> FrameSummary | None:
    """Where a function begins; None where that is not known."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(unwrap(function), "__code__", None)
    if code is None:
        return None
    line = getline(code.co_filename, code.co_firstlineno).strip()
    return FrameSummary(code.co_filename, code.co_firstlineno, code.co_name, lookup_line=False, line=line)


def _texts(error: BaseException | None) -> str:
    """What an error and its causes say."""
    return "\n".join(describe(cause) for cause in chain_of(error))  # their own texts may be no texts
