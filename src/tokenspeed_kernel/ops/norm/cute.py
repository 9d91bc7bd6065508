"""Normalisation in CuTe DSL; the kernels are in `cute_kernels`, which is imported when one is launched."""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel.cute_language import CUTE, load_cute
from tokenspeed_kernel.ops.norm.rows import added_and_normed, normed
from tokenspeed_kernel.registry import register_kernel


@register_kernel("norm", "rms_norm", **CUTE)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normed(_launch, x, weight, eps)


@register_kernel("norm", "add_rms_norm", **CUTE)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return added_and_normed(_launch, x, residual, weight, eps)


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, has_residual: bool
) -> None:
    load_cute()
    from tokenspeed_kernel.cute_run import run_cute
    from tokenspeed_kernel.ops.norm.cute_kernels import compiled

    rows, size = x.shape
    function = compiled(str(x.dtype), str(weight.dtype), has_residual)
    run_cute(function, x, residual, weight, out, total, rows, size, x.stride(0), residual.stride(0), eps)
