"""Products with block-scaled float8 weights in Triton: weights are read as they are, and widened in registers."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from tokenspeed_kernel.ops.gemm.block_fp8 import BLOCK
from tokenspeed_kernel.ops.gemm.triton_store import store_product
from tokenspeed_kernel.registry import register_kernel
from tokenspeed_kernel.rounding import cdiv, next_power_of_2
from tokenspeed_kernel.tactics import TACTICS, Tactic
from tokenspeed_kernel.triton_language import TRITON, tl, triton
from tokenspeed_kernel.triton_run import run_triton

CANDIDATES = tuple(
    MappingProxyType({"block_m": block_m, "block_n": block_n, "num_warps": warps, "num_stages": stages})
    for block_m, block_n, warps, stages in (
        (128, 32, 4, 4),
        (16, 16, 4, 5),
        (16, 32, 4, 5),
        (64, 64, 4, 4),
        (128, 64, 4, 3),
        (128, 128, 8, 3),
    )
)
"""Rows and outputs of a program, where there are so many rows, and how it is compiled."""


@register_kernel(
    "gemm",
    "block_fp8_linear",
    **{**TRITON, "capability": (8, 9)},
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
)
def block_fp8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out_size: int) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    rows = x.shape[0]
    out = torch.empty(rows, out_size, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    padded = next_power_of_2(rows)

    def run(tactic: Tactic) -> None:
        _launch(x, weight, scales, bias, out, padded, tactic)

    bucket = (x.dtype, padded, out_size, x.shape[1])
    run(TACTICS.pick("gemm.block_fp8_linear.triton", bucket, CANDIDATES, run))
    return out


def _launch(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, padded: int, tactic: Tactic
) -> None:
    (rows, in_size), out_size = x.shape, out.shape[1]
    block_m, block_n = max(16, min(padded, tactic["block_m"])), tactic["block_n"]
    run_triton(
        block_fp8_kernel,
        (cdiv(out_size, block_n), cdiv(rows, block_m)),
        x,
        weight,
        scales,
        bias,
        out,
        rows,
        in_size,
        out_size,
        x.stride(0),
        weight.stride(0),
        scales.stride(0),
        HAS_BIAS=bias is not None,
        IS_EVEN=in_size % BLOCK == 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK=BLOCK,
        num_warps=tactic["num_warps"],
        num_stages=tactic["num_stages"],
    )


@triton.jit(do_not_specialize=["rows"])
def block_fp8_kernel(
    x,
    weight,
    scales,
    bias,
    out,
    rows,
    in_size,
    out_size,
    x_stride,
    weight_stride,
    scale_stride,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Weights are padded to whole blocks, and a block of scales holds whole blocks of outputs.
    begin = tl.program_id(0) * BLOCK_N
    output = begin.to(tl.int64) + tl.arange(0, BLOCK_N)
    row = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    step = tl.arange(0, BLOCK)
    left = x + row[:, None] * x_stride + step[None, :]
    right = weight + output[None, :] * weight_stride + step[:, None]
    scale = scales + begin // BLOCK
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, in_size, BLOCK):
        inside = row[:, None] < rows
        if not IS_EVEN:
            inside = inside & (first + step < in_size)[None, :]
        a = tl.load(left + first, mask=inside, other=0.0)
        b = tl.load(right + first).to(a.dtype)
        total += tl.dot(a, b, input_precision="ieee") * tl.load(scale + first // BLOCK * scale_stride)
    store_product(total, bias, out, row, rows, output, out_size, HAS_BIAS)
