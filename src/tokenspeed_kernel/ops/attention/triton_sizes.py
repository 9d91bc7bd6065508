"""What the launches of both Triton kernels of attention have in common."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tokenspeed_kernel.rounding import next_power_of_2


def bucket_of(query: Tensor, key_pool: Tensor) -> tuple[Any, ...]:
    """The bucket of `query`, [rows, heads, head_dim], for its tactic: all that decides which one is fast."""
    rows, heads, head_dim = query.shape
    block_size, kv_heads = key_pool.shape[1:3]
    return query.dtype, next_power_of_2(rows * kv_heads), heads // kv_heads, head_dim, block_size


def head_bytes(query: Tensor) -> int:
    """Bytes of one head in shared memory, padded to a power of two."""
    return next_power_of_2(query.shape[2]) * query.element_size()


def block_dim(head_dim: int) -> int:
    """Columns of a block that holds one head; a product on tensor cores takes at least 16."""
    return next_power_of_2(max(head_dim, 16))
