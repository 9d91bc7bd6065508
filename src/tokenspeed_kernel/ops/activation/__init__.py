"""Activation functions."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.ops.activation import reference
from tokenspeed_kernel.registry import Kernel, select
from tokenspeed_kernel.triton_language import AVAILABLE, HAS_GLUON

if AVAILABLE:
    from tokenspeed_kernel.ops.activation import triton as _triton  # noqa: F401
if HAS_GLUON:
    from tokenspeed_kernel.ops.activation import gluon as _gluon  # noqa: F401

__all__ = ["plan_silu_and_mul", "reference", "silu_and_mul"]


def plan_silu_and_mul(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel that `silu_and_mul` is to use."""
    return select("activation", "silu_and_mul", device, dtype)


def silu_and_mul(x: Tensor, *, kernel: Kernel | None = None) -> Tensor:
    """`silu(gate) * up`, the gated activation of SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020).

    Args:
        x: [tokens, 2 * size], gate in the first half of a row and up in the second.
        kernel: from `plan_silu_and_mul`; chosen for `x` if it is not given.

    Returns:
        [tokens, size], of x's dtype.
    """
    kernel = kernel or plan_silu_and_mul(x.device, x.dtype)
    out: Tensor = kernel(x)
    return out
