"""Normalisation in Triton: one program a row."""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel.ops.norm.rows import added_and_normed, normed
from tokenspeed_kernel.registry import register_kernel
from tokenspeed_kernel.rounding import next_power_of_2
from tokenspeed_kernel.triton_language import TRITON, tl, triton
from tokenspeed_kernel.triton_run import run_triton


@register_kernel("norm", "rms_norm", **TRITON)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normed(_launch, x, weight, eps)


@register_kernel("norm", "add_rms_norm", **TRITON)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return added_and_normed(_launch, x, residual, weight, eps)


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, has_residual: bool
) -> None:
    rows, size = x.shape
    block = next_power_of_2(size)
    run_triton(
        rms_norm_kernel,
        (rows,),
        x,
        residual,
        weight,
        out,
        total,
        x.stride(0),
        residual.stride(0),
        size,
        eps,
        HAS_RESIDUAL=has_residual,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    x_stride,
    residual_stride,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    dtype = value.dtype
    wide = value.to(tl.float32)
    if HAS_RESIDUAL:
        added = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        value = (wide + added.to(tl.float32)).to(dtype)
        tl.store(total + row * size + column, value, mask=inside)
        wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    # Rounded before the weight is applied, as the reference does.
    normal = (wide * scale).to(dtype).to(tl.float32)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (normal * gain).to(dtype), mask=inside)
