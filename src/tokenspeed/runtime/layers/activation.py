"""Activation functions."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed.runtime.layers.base import Layer
from tokenspeed_kernel.ops.activation import plan_silu_and_mul, silu_and_mul


class SiluAndMul(Layer):
    """The gated activation of SwiGLU."""

    def plan(self, device: torch.device, dtype: torch.dtype) -> None:
        self.kernel = plan_silu_and_mul(device, dtype)

    def forward(self, gate_up: Tensor) -> Tensor:
        """[tokens, 2 * size], gate then up, to [tokens, size]."""
        return silu_and_mul(gate_up, kernel=self.kernel)
