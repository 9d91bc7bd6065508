"""Rotary position embedding (Su et al., "RoFormer", 2021) that rotates the halves of a head together."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.ops.rope import reference
from tokenspeed_kernel.registry import Kernel, select
from tokenspeed_kernel.triton_language import AVAILABLE

if AVAILABLE:
    from tokenspeed_kernel.ops.rope import triton as _triton  # noqa: F401

__all__ = ["apply_rope", "plan_apply_rope", "plan_rope_and_write_kv", "reference", "rope_and_write_kv"]


def plan_apply_rope(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel that `apply_rope` is to use."""
    return select("rope", "apply_rope", device, dtype)


def plan_rope_and_write_kv(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel that `rope_and_write_kv` is to use."""
    return select("rope", "rope_and_write_kv", device, dtype)


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


def rope_and_write_kv(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    slot_mapping: Tensor,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    eps: float = 0.0,
    *,
    kernel: Kernel | None = None,
) -> Tensor:
    """What a step does between its QKV product and its attention, in one kernel.

    Query and key heads are normalised (`ops.norm.rms_norm` over head_dim) if weights are given, then rotated as
    by `apply_rope`; keys and values are written as by `ops.kvcache.write_kv`.

    Args:
        positions: int64 [tokens], each below the rows of `cos_sin`.
        query: [tokens, heads, head_dim]; heads and tokens may be strided.
        key: [tokens, kv_heads, head_dim]; heads and tokens may be strided.
        value: like `key`.
        cos_sin: float32 [max_position, head_dim], as in `apply_rope`.
        key_pool: [blocks, block_size, kv_heads, head_dim]; written.
        value_pool: like `key_pool`; written.
        slot_mapping: int64 [tokens]; of several writes to one slot any may stay.
        query_weight: [head_dim], or None for no normalisation.
        key_weight: [head_dim], given if `query_weight` is.
        eps: added to the mean square.
        kernel: from `plan_rope_and_write_kv`; chosen for `query` if it is not given.

    Returns:
        The query, a new contiguous tensor of the same shape and dtype.
    """
    kernel = kernel or plan_rope_and_write_kv(query.device, query.dtype)
    out: Tensor = kernel(
        positions, query, key, value, cos_sin, key_pool, value_pool, slot_mapping, query_weight, key_weight, eps
    )
    return out
