"""Rotary position embedding (Su et al., "RoFormer", 2021) that rotates the halves of a head together."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.ops.rope import reference
from tokenspeed_kernel.registry import Kernel, select

__all__ = ["apply_rope", "plan_apply_rope", "reference"]


def plan_apply_rope(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel that `apply_rope` is to use."""
    return select("rope", "apply_rope", device, dtype)


def apply_rope(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor, *, kernel: Kernel | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate query and key heads by the angle of their position, computed in float32.

    Dimensions i and i + head_dim / 2 of a head form one pair, as in the Hugging Face checkpoints.

    Args:
        positions: int64 [tokens], each below the rows of `cos_sin`.
        query: [tokens, heads, head_dim]; heads and tokens may be strided.
        key: [tokens, kv_heads, head_dim]; heads and tokens may be strided.
        cos_sin: float32 [max_position, head_dim], a row holding head_dim / 2 cosines and then as many sines.
        kernel: from `plan_apply_rope`; chosen for `query` if it is not given.

    Returns:
        (query, key), new contiguous tensors of the same shapes and dtypes.
    """
    kernel = kernel or plan_apply_rope(query.device, query.dtype)
    out: tuple[Tensor, Tensor] = kernel(positions, query, key, cos_sin)
    return out
