"""Scratch memory that kernels share: sized while a rank starts up, and fixed before the first step is captured.

A captured step holds addresses. Memory that grew later would leave old steps with memory that is someone else's, so
that growth after `freeze` is an error that names the kernel. The workspace is outside `tokenspeed_kernel.ops`, so
that it outlasts an edit of the kernels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokenspeed.errors import ResourceError

ALIGNMENT = 256
"""Bytes. What `take` gives begins at multiples of it."""

Array = tuple[tuple[int, ...], torch.dtype]
"""Shape and type."""

MOST_VIEWS = 512
"""Sets of arrays that are kept: a step asks for the same ones in every layer."""


class WorkspaceError(ResourceError):
    """A kernel needs more scratch memory than was planned at start-up."""


class Workspace:
    """One buffer a device. Kernels run one after another, so that each may have all of it."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, Tensor] = {}
        self._frozen: set[torch.device] = set()
        self._captured: list[Tensor] = []
        self._views: dict[tuple[torch.device, tuple[Array, ...]], tuple[Tensor, ...]] = {}

    def take(self, caller: str, device: torch.device, *arrays: Array, at_least: int = 0) -> tuple[Tensor, ...]:
        """Uninitialised arrays on `device`, to be used by what the caller launches before anybody takes again.

        Args:
            caller: name of the kernel, for the error.
            device: where.
            arrays: what is needed.
            at_least: bytes that other calls of this kernel may need; the first call plans for all of them.

        Raises:
            WorkspaceError: start-up is over, and more is needed than it has planned.
        """
        views = self._views.get((device, arrays))
        if views is None:
            views = self._take(caller, device, arrays, at_least)
            if len(self._views) < MOST_VIEWS:
                self._views[device, arrays] = views
        return views

    def _take(self, caller: str, device: torch.device, arrays: tuple[Array, ...], at_least: int) -> tuple[Tensor, ...]:
        ends = []
        end = 0
        for shape, dtype in arrays:
            end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
            ends.append(end)
        buffer = self._buffers.get(device)
        if buffer is None or buffer.shape[0] < end:
            buffer = self._grow(caller, device, max(end, at_least))
        return tuple(
            buffer[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for (shape, dtype), begin in zip(arrays, [0, *ends], strict=False)
        )

    def freeze(self, device: torch.device) -> int:
        """Let the workspace of `device` never change again; returns its bytes."""
        self._frozen.add(device)
        buffer = self._buffers.get(device)
        if buffer is None:
            return 0
        self._captured.append(buffer)
        return buffer.shape[0]

    def reopen(self, device: torch.device) -> None:
        """Plan anew, for another engine of this process; what was captured before keeps the memory that it knows."""
        self._frozen.discard(device)

    def _grow(self, caller: str, device: torch.device, size: int) -> Tensor:
        held = self._buffers.get(device)
        if device in self._frozen:
            has = 0 if held is None else held.shape[0]
            raise WorkspaceError(
                f"{caller} needs a workspace of {size} bytes and start-up has planned {has}; restart the server"
            )
        # What was taken before is part of the memory that is given up.
        self._views.clear()
        buffer = self._buffers[device] = torch.empty(size, dtype=torch.uint8, device=device)
        return buffer


WORKSPACE = Workspace()
"""The workspace of this process."""
