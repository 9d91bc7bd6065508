"""Products with weights in float8 (e4m3) that have a scale for each block: their form, and the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.registry import register_kernel

BLOCK = 128
"""Rows and columns of a block of weights."""
DTYPE = torch.float8_e4m3fn


def blocks(size: int) -> int:
    """Blocks that rows or columns take."""
    return -(-size // BLOCK)


def process(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Weights as the kernels want them, from those of a checkpoint.

    Args:
        weight: e4m3 [out_size, in_size].
        scales: `weight_scale_inv`, [out_size / 128, in_size / 128], both rounded up.

    Returns:
        The weights, padded with zeros to whole blocks, and float32 scales [in blocks, out blocks], so that the
        scales of neighbouring programs are neighbours.
    """
    out_size, in_size = weight.shape
    padding = (0, -in_size % BLOCK, 0, -out_size % BLOCK)
    if any(padding):
        # No operation of torch pads float8: its bytes are padded, and zero bytes are zeros.
        weight = torch.nn.functional.pad(weight.view(torch.uint8), padding).view(DTYPE)
    return weight.contiguous(), scales.float().t().contiguous()


@register_kernel("gemm", "block_fp8_linear", solution="reference")
def block_fp8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out_size: int) -> Tensor:
    full = dequantise(weight, scales)[:out_size, : x.shape[1]]
    return torch.nn.functional.linear(x, full.to(x.dtype), bias)


def dequantise(weight: Tensor, scales: Tensor) -> Tensor:
    """float32 weights, padding included, from what `process` gave."""
    spread = scales.t().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * spread
