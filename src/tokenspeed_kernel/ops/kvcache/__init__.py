"""The paged KV cache: block b, offset o of a pool is slot b * block_size + o."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.ops.kvcache import reference
from tokenspeed_kernel.registry import Kernel, select
from tokenspeed_kernel.triton_language import AVAILABLE

if AVAILABLE:
    from tokenspeed_kernel.ops.kvcache import triton as _triton  # noqa: F401

__all__ = ["plan_write_kv", "reference", "write_kv"]


def plan_write_kv(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel that `write_kv` is to use."""
    return select("kvcache", "write_kv", device, dtype)


def write_kv(
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    slot_mapping: Tensor,
    *,
    kernel: Kernel | None = None,
) -> None:
    """Write the keys and values of a step into their slots; of several writes to one slot any may stay.

    Args:
        key: [tokens, kv_heads, head_dim]; may be strided.
        value: like `key`.
        key_pool: [blocks, block_size, kv_heads, head_dim], in any order of memory; written.
        value_pool: like `key_pool`; written.
        slot_mapping: int64 [tokens].
        kernel: from `plan_write_kv`; chosen for `key` if it is not given.
    """
    kernel = kernel or plan_write_kv(key.device, key.dtype)
    kernel(key, value, key_pool, value_pool, slot_mapping)
