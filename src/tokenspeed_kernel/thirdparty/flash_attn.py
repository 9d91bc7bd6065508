"""Attention by FlashAttention-3 (Shah et al., 2024), whose Python package is `flash_attn_interface`.

One function of the library does both: it takes the paged cache as it is, and queries of varying length.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from flash_attn_interface import flash_attn_with_kvcache
from torch import Tensor

from tokenspeed_kernel.registry import register_kernel

PRIORITY = 5
"""Below Triton's solutions, which are tested here: --attention-backend flash_attn asks for these."""
DTYPES = (torch.bfloat16, torch.float16)
CAPABILITY = (9, 0)
TRAITS = MappingProxyType({"head_dim": range(8, 257, 8)})


@register_kernel(
    "attention",
    "decode",
    solution="flash_attn",
    priority=PRIORITY,
    devices=("cuda",),
    dtypes=DTYPES,
    capability=CAPABILITY,
    traits=TRAITS,
)
def decode(
    query: Tensor, key_pool: Tensor, value_pool: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    out: Tensor = flash_attn_with_kvcache(
        query.unsqueeze(1),
        key_pool,
        value_pool,
        cache_seqlens=seq_lens,
        page_table=block_tables,
        softmax_scale=scale,
        causal=True,
    )
    return out.squeeze(1)


@register_kernel(
    "attention",
    "extend",
    solution="flash_attn",
    priority=PRIORITY,
    devices=("cuda",),
    dtypes=DTYPES,
    capability=CAPABILITY,
    traits=TRAITS,
)
def extend(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    max_query_len: int,
    scale: float,
) -> Tensor:
    out: Tensor = flash_attn_with_kvcache(
        query,
        key_pool,
        value_pool,
        cache_seqlens=seq_lens,
        page_table=block_tables,
        cu_seqlens_q=query_start,
        max_seqlen_q=max_query_len,
        softmax_scale=scale,
        causal=True,
    )
    return out
