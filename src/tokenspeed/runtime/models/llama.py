"""Llama (Touvron et al., 2023) with grouped-query attention: LlamaForCausalLM.

Module names are those of the Hugging Face checkpoints, except that q, k and v and gate and up are merged.
In the shapes below `hidden` and `residual` are [tokens, hidden_size], of the model's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tokenspeed.runtime.layers.activation import SiluAndMul
from tokenspeed.runtime.layers.attention import PagedAttention
from tokenspeed.runtime.layers.context import ForwardContext
from tokenspeed.runtime.layers.embedding import VocabParallelEmbedding
from tokenspeed.runtime.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from tokenspeed.runtime.layers.norm import RMSNorm
from tokenspeed.runtime.layers.rotary import RotaryEmbedding
from tokenspeed.runtime.models.base import CausalLM
from tokenspeed.runtime.models.config import ModelConfig

if TYPE_CHECKING:
    from tokenspeed.runtime.distributed.group import Group


class LlamaAttention(nn.Module):
    """Self-attention of layer `index`, of which each rank computes its own heads."""

    def __init__(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, group: Group) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            config.attention_bias,
            group,
            config.block_fp8,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, config.hidden_size, config.attention_bias, group, config.block_fp8
        )
        self.rotary = rotary
        self.attention = PagedAttention(index, config.head_dim)

    def forward(self, hidden: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """`hidden` to its shape, summed over the ranks; `positions` are int64 [tokens]. Writes the step's KV."""
        query, key, value = self.qkv_proj(hidden)
        query = self.rotary(positions, query, key, value, ctx.kv[self.attention.index], ctx.slot_mapping)
        out: Tensor = self.o_proj(self.attention(query, ctx))
        return out


class LlamaMLP(nn.Module):
    """The gated MLP: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__()
        self.gate_up_proj = ColumnParallelLinear(
            config.hidden_size,
            (config.intermediate_size, config.intermediate_size),
            config.mlp_bias,
            group,
            sources=("gate_proj", "up_proj"),
            block_fp8=config.block_fp8,
        )
        self.activation = SiluAndMul()
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, config.mlp_bias, group, config.block_fp8
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden` to its shape, summed over the ranks."""
        out: Tensor = self.down_proj(self.activation(self.gate_up_proj(hidden)))
        return out


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm that first adds what came before to the residual."""

    def __init__(self, config: ModelConfig, attention: LlamaAttention, group: Group) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config, group)

    def forward(
        self, hidden: Tensor, residual: Tensor, positions: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """(output of the MLP, residual without that output): the next norm adds the two."""
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, positions, ctx)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class LlamaModel(nn.Module):
    """Embedding, decoder layers and the final norm."""

    attention_type: type[LlamaAttention] = LlamaAttention

    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__()
        rotary = RotaryEmbedding(config.head_dim, config.max_position, config.rope_theta, config.rope_scaling)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, group)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, self.attention_type(config, index, rotary, group), group)
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """int64 [tokens] ids and positions to normalised hidden states [tokens, hidden_size]."""
        hidden = self.embed_tokens(input_ids)
        residual = torch.zeros_like(hidden)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, positions, ctx)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class LlamaForCausalLM(CausalLM):
    """The model with its output head, which may be the embedding itself (`tie_embeddings`)."""

    body_type: type[LlamaModel] = LlamaModel

    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__()
        self.config = config
        self.model = self.body_type(config, group)
        self.lm_head = (
            self.model.embed_tokens
            if config.tie_embeddings
            else VocabParallelEmbedding(config.vocab_size, config.hidden_size, group)
        )

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        hidden: Tensor = self.model(input_ids, positions, ctx)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head.logits(hidden)
