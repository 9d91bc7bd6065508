"""Activation functions in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.registry import register_kernel
from tokenspeed_kernel.rounding import cdiv
from tokenspeed_kernel.triton_language import TRITON, tl, triton
from tokenspeed_kernel.triton_run import run_triton

BLOCK = 1024


@register_kernel("activation", "silu_and_mul", **TRITON)
def silu_and_mul(x: Tensor) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(tokens, size, dtype=x.dtype, device=x.device)
    if out.numel():
        run_triton(
            silu_and_mul_kernel, (tokens, cdiv(size, BLOCK)), x, out, x.stride(0), size, BLOCK=BLOCK, num_warps=4
        )
    return out


@triton.jit
def silu_and_mul_kernel(x, out, x_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    up = tl.load(x + row * x_stride + size + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded before the product, as the reference does.
    active = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    tl.store(out + row * size + column, (active * up.to(tl.float32)).to(gate.dtype), mask=inside)
