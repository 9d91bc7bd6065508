"""Matrix products with weights."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.ops.gemm import reference
from tokenspeed_kernel.registry import Kernel, select

__all__ = ["linear", "plan_linear", "reference"]


def plan_linear(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel that `linear` is to use."""
    return select("gemm", "linear", device, dtype)


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
