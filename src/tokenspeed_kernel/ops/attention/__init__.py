"""Attention of a step's tokens to the paged KV cache, whose slots for these tokens are already written.

Query head h attends with KV head h // (heads / kv_heads). Softmax and sums are accumulated in float32.
What a row returns depends on its own sequence only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.ops.attention import backends, reference, trimmed
from tokenspeed_kernel.registry import Kernel, select
from tokenspeed_kernel.triton_language import AVAILABLE

if AVAILABLE:
    from tokenspeed_kernel.ops.attention import triton_decode as _triton_decode  # noqa: F401
    from tokenspeed_kernel.ops.attention import triton_extend as _triton_extend  # noqa: F401

__all__ = [
    "backends",
    "decode_attention",
    "extend_attention",
    "plan_decode_attention",
    "plan_extend_attention",
    "reference",
    "trimmed",
]


def plan_decode_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The kernel that `decode_attention` is to use."""
    return select("attention", "decode", device, dtype, head_dim=head_dim)


def plan_extend_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The kernel that `extend_attention` is to use."""
    return select("attention", "extend", device, dtype, head_dim=head_dim)


def decode_attention(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    kernel: Kernel | None = None,
) -> Tensor:
    """One new token of each sequence attends to the whole sequence.

    Args:
        query: [seqs, heads, head_dim].
        key_pool: [blocks, block_size, kv_heads, head_dim], in any order of memory that keeps head_dim dense.
        value_pool: like `key_pool`.
        block_tables: int32 [seqs, width]; entry j of a row is the block of positions j * block_size and on.
        seq_lens: int32 [seqs], at most width * block_size; 0 marks a padding row, whose result is arbitrary.
        scale: factor of the scores before the softmax.
        kernel: from `plan_decode_attention`; chosen for `query` if it is not given.

    Returns:
        [seqs, heads, head_dim], of the query's dtype.
    """
    kernel = kernel or plan_decode_attention(query.device, query.dtype, query.shape[2])
    out: Tensor = kernel(query, key_pool, value_pool, block_tables, seq_lens, scale)
    return out


def extend_attention(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    max_query_len: int,
    scale: float,
    *,
    kernel: Kernel | None = None,
) -> Tensor:
    """The last tokens of each sequence attend causally to the sequence: prefill, chunks of it, decode, mixed.

    Args:
        query: [tokens, heads, head_dim]; rows from query_start[-1] on are padding, their result is arbitrary.
        key_pool: [blocks, block_size, kv_heads, head_dim], in any order of memory that keeps head_dim dense.
        value_pool: like `key_pool`.
        block_tables: int32 [seqs, width]; entry j of a row is the block of positions j * block_size and on.
        seq_lens: int32 [seqs], with the tokens of this step; 0 marks a padding row.
        query_start: int32 [seqs + 1]; sequence i has its last tokens in rows query_start[i] and on.
        max_query_len: bound of the rows of one sequence.
        scale: factor of the scores before the softmax.
        kernel: from `plan_extend_attention`; chosen for `query` if it is not given.

    Returns:
        [tokens, heads, head_dim], of the query's dtype.
    """
    kernel = kernel or plan_extend_attention(query.device, query.dtype, query.shape[2])
    out: Tensor = kernel(query, key_pool, value_pool, block_tables, seq_lens, query_start, max_query_len, scale)
    return out
