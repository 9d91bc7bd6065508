"""Activation functions in Gluon: Triton's language with the layout of each tile written out."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.registry import register_kernel
from tokenspeed_kernel.rounding import cdiv
from tokenspeed_kernel.triton_language import GLUON, gl, gluon
from tokenspeed_kernel.triton_run import run_triton

WARPS = 4
PER_THREAD = 8
"""Columns of one thread: 16 bytes of a half type, the widest load there is."""
BLOCK = PER_THREAD * 32 * WARPS


@register_kernel("activation", "silu_and_mul", **GLUON)
def silu_and_mul(x: Tensor) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(tokens, size, dtype=x.dtype, device=x.device)
    if out.numel():
        run_triton(
            silu_and_mul_kernel,
            (tokens, cdiv(size, BLOCK)),
            x,
            out,
            x.stride(0),
            size,
            PER_THREAD=PER_THREAD,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return out


@gluon.jit
def silu_and_mul_kernel(x, out, x_stride, size, PER_THREAD: gl.constexpr, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([PER_THREAD], [32], [gl.num_warps()], [0])
    row = gl.program_id(0).to(gl.int64)
    column = gl.program_id(1) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    inside = column < size
    gate = gl.load(x + row * x_stride + column, mask=inside, other=0.0)
    up = gl.load(x + row * x_stride + size + column, mask=inside, other=0.0)
    wide = gate.to(gl.float32)
    # Rounded before the product, as the reference does.
    active = (wide / (1.0 + gl.exp(-wide))).to(gate.dtype).to(gl.float32)
    gl.store(out + row * size + column, (active * up.to(gl.float32)).to(gate.dtype), mask=inside)
