"""Rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenspeed.runtime.layers.base import Layer
from tokenspeed_kernel.ops.rope import apply_rope, plan_apply_rope


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
        self.kernel = plan_apply_rope(device, dtype)
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

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated copies of query and key, [tokens, heads, head_dim]; positions are int64 [tokens]."""
        return apply_rope(positions, query, key, self.cos_sin, kernel=self.kernel)


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
