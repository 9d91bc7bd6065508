"""Attention over the paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed.runtime.layers.base import Layer
from tokenspeed.runtime.layers.context import ForwardContext
from tokenspeed_kernel.ops.attention import (
    decode_attention,
    extend_attention,
    plan_decode_attention,
    plan_extend_attention,
)


class PagedAttention(Layer):
    """Causal attention of one model layer; `index` says which of the step's KV pools is its own."""

    def __init__(self, index: int, head_dim: int) -> None:
        super().__init__()
        self.index = index
        self.head_dim = head_dim
        self.scale = head_dim**-0.5

    def plan(self, device: torch.device, dtype: torch.dtype) -> None:
        self.decode_kernel = plan_decode_attention(device, dtype, self.head_dim)
        self.extend_kernel = plan_extend_attention(device, dtype, self.head_dim)

    def forward(self, query: Tensor, ctx: ForwardContext) -> Tensor:
        """Attend to the cache, which holds the step's keys and values already.

        Args:
            query: [tokens, local_heads, head_dim].
            ctx: the step.

        Returns:
            [tokens, local_heads * head_dim].
        """
        keys, values = ctx.kv[self.index]
        if ctx.max_query_len == 1:
            out = decode_attention(
                query, keys, values, ctx.block_tables, ctx.seq_lens, self.scale, kernel=self.decode_kernel
            )
        else:
            out = extend_attention(
                query,
                keys,
                values,
                ctx.block_tables,
                ctx.seq_lens,
                ctx.query_start,
                ctx.max_query_len,
                self.scale,
                kernel=self.extend_kernel,
            )
        return out.flatten(1)
