"""What every norm over rows does around its kernel: rows of any strides, dense results, no launch for no rows."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Launch(Protocol):
    """Launches the kernel of a solution.

    x and residual are [rows, size], their last dimension dense; out and total are dense and of as many elements.
    Without a residual, residual is x and total is out, and neither is used.
    """

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, has_residual: bool
    ) -> None: ...


def normed(launch: Launch, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`norm.rms_norm` by way of `launch`."""
    rows = _rows(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows.shape[0]:
        launch(rows, rows, weight, out, out, eps, has_residual=False)
    return out


def added_and_normed(launch: Launch, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`norm.add_rms_norm` by way of `launch`."""
    rows, others = _rows(x), _rows(residual)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows.shape[0]:
        launch(rows, others, weight, out, total, eps, has_residual=True)
    return out, total


def _rows(x: Tensor) -> Tensor:
    """x as [rows, size] whose last dimension is dense; a copy only where no view is possible."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
