"""Activation functions in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from tokenspeed_kernel.registry import register_kernel


@register_kernel("activation", "silu_and_mul", solution="reference")
def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return silu(gate) * up
