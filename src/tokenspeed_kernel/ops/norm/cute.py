"""Normalisation in CuTe DSL; the kernels are in `cute_kernels`, which is imported when one is launched."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.cute_language import CUTE, load_cute
from tokenspeed_kernel.registry import register_kernel


@register_kernel("norm", "rms_norm", **CUTE)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = _rows(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows.shape[0]:
        _launch(rows, rows, weight, out, out, eps, has_residual=False)
    return out


@register_kernel("norm", "add_rms_norm", **CUTE)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, others = _rows(x), _rows(residual)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows.shape[0]:
        _launch(rows, others, weight, out, total, eps, has_residual=True)
    return out, total


def _rows(x: Tensor) -> Tensor:
    """x as [rows, size] whose last dimension is dense; a copy only where no view is possible."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, has_residual: bool
) -> None:
    load_cute()
    from tokenspeed_kernel.cute_run import run_cute
    from tokenspeed_kernel.ops.norm.cute_kernels import compiled

    rows, size = x.shape
    function = compiled(str(x.dtype), str(weight.dtype), has_residual)
    run_cute(function, x, residual, weight, out, total, rows, size, x.stride(0), residual.stride(0), eps)
