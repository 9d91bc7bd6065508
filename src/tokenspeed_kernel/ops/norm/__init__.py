"""Root mean square normalisation (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.cute_language import HAS_CUTE
from tokenspeed_kernel.ops.norm import reference
from tokenspeed_kernel.registry import Kernel, select
from tokenspeed_kernel.triton_language import AVAILABLE

if AVAILABLE:
    from tokenspeed_kernel.ops.norm import triton as _triton  # noqa: F401
if HAS_CUTE:
    from tokenspeed_kernel.ops.norm import cute as _cute  # noqa: F401

__all__ = ["add_rms_norm", "plan_add_rms_norm", "plan_rms_norm", "reference", "rms_norm"]


def plan_rms_norm(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel that `rms_norm` is to use."""
    return select("norm", "rms_norm", device, dtype)


def plan_add_rms_norm(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel that `add_rms_norm` is to use."""
    return select("norm", "add_rms_norm", device, dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, kernel: Kernel | None = None) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension, computed in float32.

    Args:
        x: [..., size].
        weight: [size].
        eps: added to the mean square.
        kernel: from `plan_rms_norm`; chosen for `x` if it is not given.

    Returns:
        A new tensor of x's shape and dtype.
    """
    kernel = kernel or plan_rms_norm(x.device, x.dtype)
    out: Tensor = kernel(x, weight, eps)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, kernel: Kernel | None = None
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of `x + residual`, and that sum.

    Args:
        x: [..., size].
        residual: of x's shape and dtype; not written.
        weight: [size].
        eps: added to the mean square.
        kernel: from `plan_add_rms_norm`; chosen for `x` if it is not given.

    Returns:
        (normalised sum, sum), both of x's shape and dtype.
    """
    kernel = kernel or plan_add_rms_norm(x.device, x.dtype)
    out: tuple[Tensor, Tensor] = kernel(x, residual, weight, eps)
    return out
