"""Matrix products with weights."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.ops.gemm import block_fp8, packed_half, reference
from tokenspeed_kernel.registry import Kernel, select
from tokenspeed_kernel.triton_language import AVAILABLE

if AVAILABLE:
    from tokenspeed_kernel.ops.gemm import block_fp8_triton as _block_fp8_triton  # noqa: F401
    from tokenspeed_kernel.ops.gemm import triton as _triton  # noqa: F401

__all__ = [
    "block_fp8",
    "block_fp8_linear",
    "linear",
    "packed_half",
    "plan_block_fp8_linear",
    "plan_linear",
    "reference",
]


def plan_linear(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel that `linear` is to use."""
    return select("gemm", "linear", device, dtype)


def plan_block_fp8_linear(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel that `block_fp8_linear` is to use for activations of `dtype`."""
    return select("gemm", "block_fp8_linear", device, dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, kernel: Kernel | None = None) -> Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: [tokens, in_size].
        weight: [out_size, in_size].
        bias: [out_size], or None.
        kernel: from `plan_linear`; chosen for `x` if it is not given.

    Returns:
        [tokens, out_size], of x's dtype.
    """
    kernel = kernel or plan_linear(x.device, x.dtype)
    out: Tensor = kernel(x, weight, bias)
    return out


def block_fp8_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out_size: int,
    *,
    kernel: Kernel | None = None,
) -> Tensor:
    """`x @ (weight * scales).T + bias`, the weights in float8 with a scale for each block of 128 by 128.

    That is the form of the checkpoints of DeepSeek-V3 ("DeepSeek-V3 Technical Report", 2024, section 3.3). The
    activations keep their type: the sums are as exact as those of a product with dequantised weights.

    Args:
        x: [tokens, in_size].
        weight: e4m3, from `block_fp8.process`.
        scales: float32, from `block_fp8.process`.
        bias: [out_size], or None.
        out_size: outputs; the weights may be padded beyond them.
        kernel: from `plan_block_fp8_linear`; chosen for `x` if it is not given.

    Returns:
        [tokens, out_size], of x's dtype.
    """
    kernel = kernel or plan_block_fp8_linear(x.device, x.dtype)
    out: Tensor = kernel(x, weight, scales, bias, out_size)
    return out
