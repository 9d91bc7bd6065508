"""Products with weights in Triton, for the few rows of a decode step: reading the weights is all that costs time.

More rows go to torch, and so do few ones unless tuning found a tactic that is faster.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from tokenspeed_kernel.ops.gemm.triton_store import store_product
from tokenspeed_kernel.registry import register_kernel
from tokenspeed_kernel.rounding import cdiv, next_power_of_2
from tokenspeed_kernel.tactics import TACTICS, Tactic
from tokenspeed_kernel.triton_language import TRITON, tl, triton
from tokenspeed_kernel.triton_run import run_triton

MOST_ROWS = 64
"""Rows from which on a product is bound by arithmetic rather than by reading weights."""

CANDIDATES = tuple(
    MappingProxyType({"block_n": block_n, "block_k": block_k, "num_warps": warps, "num_stages": stages})
    for block_n, block_k, warps, stages in (
        (0, 0, 0, 0),
        (16, 256, 4, 4),
        (0, 0, 0, 0),
        (16, 128, 2, 6),
        (32, 256, 4, 4),
        (64, 128, 4, 4),
    )
)
"""Outputs of a program, inputs of one step of its loop, and how it is compiled; 0 leaves the product to torch."""


@register_kernel(
    "gemm",
    "linear",
    **TRITON,
    dtypes=(torch.bfloat16, torch.float16),
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, in_size = x.shape
    if not 0 < rows <= MOST_ROWS:
        return torch.nn.functional.linear(x, weight, bias)
    block_m = max(16, next_power_of_2(rows))

    def run(tactic: Tactic) -> Tensor:
        return _product(x, weight, bias, block_m, tactic)

    bucket = (x.dtype, block_m, weight.shape[0], in_size)
    return run(TACTICS.pick("gemm.linear.triton", bucket, CANDIDATES, run))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, block_m: int, tactic: Tactic) -> Tensor:
    block_n, block_k = tactic["block_n"], tactic["block_k"]
    if not block_n:
        return torch.nn.functional.linear(x, weight, bias)
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, in_size = x.shape
    out_size = weight.shape[0]
    out = torch.empty(rows, out_size, dtype=x.dtype, device=x.device)
    run_triton(
        linear_kernel,
        (cdiv(out_size, block_n),),
        x,
        weight,
        bias,
        out,
        rows,
        in_size,
        out_size,
        x.stride(0),
        weight.stride(0),
        HAS_BIAS=bias is not None,
        IS_EVEN=in_size % block_k == 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=tactic["num_warps"],
        num_stages=tactic["num_stages"],
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    in_size,
    out_size,
    x_stride,
    weight_stride,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    output = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    step = tl.arange(0, BLOCK_K)
    left = x + row[:, None] * x_stride + step[None, :]
    right = weight + output[None, :] * weight_stride + step[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, in_size, BLOCK_K):
        if IS_EVEN:
            a = tl.load(left + first, mask=row[:, None] < rows, other=0.0)
            b = tl.load(right + first, mask=output[None, :] < out_size, other=0.0, eviction_policy="evict_first")
        else:
            inside = first + step < in_size
            a = tl.load(left + first, mask=(row[:, None] < rows) & inside[None, :], other=0.0)
            b = tl.load(right + first, mask=(output[None, :] < out_size) & inside[:, None], other=0.0)
        total = tl.dot(a, b, total)
    store_product(total, bias, out, row, rows, output, out_size, HAS_BIAS)
