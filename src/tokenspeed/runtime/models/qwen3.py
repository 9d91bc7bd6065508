"""Qwen3 without experts (Qwen team, "Qwen3 Technical Report", 2025): Qwen3ForCausalLM.

It is Llama with a norm over each query and each key head before the rotary embedding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from tokenspeed.runtime.layers.context import ForwardContext
from tokenspeed.runtime.layers.norm import RMSNorm
from tokenspeed.runtime.layers.rotary import RotaryEmbedding
from tokenspeed.runtime.models.config import ModelConfig
from tokenspeed.runtime.models.llama import LlamaAttention, LlamaForCausalLM, LlamaModel

if TYPE_CHECKING:
    from tokenspeed.runtime.distributed.group import Group


class Qwen3Attention(LlamaAttention):
    """Self-attention of layer `index`, of which each rank computes its own heads."""

    def __init__(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, group: Group) -> None:
        super().__init__(config, index, rotary, group)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, hidden: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        query, key, value = self.qkv_proj(hidden)
        cache, norms = ctx.kv[self.attention.index], (self.q_norm, self.k_norm)
        query = self.rotary(positions, query, key, value, cache, ctx.slot_mapping, norms)
        out: Tensor = self.o_proj(self.attention(query, ctx))
        return out


class Qwen3Model(LlamaModel):
    """Embedding, decoder layers and the final norm."""

    attention_type = Qwen3Attention


class Qwen3ForCausalLM(LlamaForCausalLM):
    """The model with its output head, which may be the embedding itself (`tie_embeddings`)."""

    body_type = Qwen3Model
