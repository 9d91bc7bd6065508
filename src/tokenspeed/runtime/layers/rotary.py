"""Rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenspeed.runtime.layers.base import Layer
from tokenspeed.runtime.layers.norm import RMSNorm
from tokenspeed_kernel.ops.rope import plan_rope_and_write_kv, rope_and_write_kv


class RotaryEmbedding(Layer):
    """Rotates query and key heads by their position; all attention layers of a model share one.

    `scaling` is None or has `rope_type` linear (position interpolation, Chen et al., 2023) or llama3 (the
    frequency bands of Llama 3.1), with the numbers that `ModelConfig.rope_scaling` holds.
    """

    def __init__(self, head_dim: int, max_position: int, theta: float, scaling: Mapping[str, Any] | None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.max_position = max_position
        self.theta = theta
        self.scaling = scaling

    def plan(self, device: torch.device, dtype: torch.dtype) -> None:
        self.kernel = plan_rope_and_write_kv(device, dtype)
        positions = torch.arange(self.max_position, dtype=torch.float32, device=device)
        angles = torch.outer(positions, self.frequencies().to(device))
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)

    def frequencies(self) -> Tensor:
        """float32 [head_dim / 2] on the CPU: radians a position."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        base = 1.0 / self.theta**exponents
        if self.scaling is None:
            return base
        if self.scaling["rope_type"] == "linear":
            return base / self.scaling["factor"]
        return _llama3(base, **{name: float(v) for name, v in self.scaling.items() if name != "rope_type"})

    def forward(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> Tensor:
        """Normalise the heads of query and key, if there are norms for them, rotate them, and write the cache.

        Args:
            positions: int64 [tokens].
            query: [tokens, local_heads, head_dim].
            key: [tokens, local_kv_heads, head_dim].
            value: like `key`.
            cache: the layer's key and value pool, as in `ForwardContext.kv`; written.
            slot_mapping: int64 [tokens].
            norms: of query and key heads, with equal eps.

        Returns:
            The rotated query, a new tensor.
        """
        query_weight = key_weight = None
        eps = 0.0
        if norms is not None:
            query_weight, key_weight, eps = norms[0].weight, norms[1].weight, norms[0].eps
        return rope_and_write_kv(
            positions,
            query,
            key,
            value,
            self.cos_sin,
            *cache,
            slot_mapping,
            query_weight,
            key_weight,
            eps,
            kernel=self.kernel,
        )


def _llama3(
    base: Tensor,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> Tensor:
    """Divide slow frequencies by `factor`, leave fast ones, and blend in between by wavelength."""
    turns = original_max_position_embeddings * base / (2 * math.pi)
    blend = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return torch.lerp(base / factor, base, blend.clamp(0, 1))
