"""What a reload relies on: layers run what is registered, and a plan picks up new kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed.runtime.layers.activation import SiluAndMul
from tokenspeed.runtime.layers.norm import RMSNorm
from tokenspeed_kernel.registry import REGISTRY, register_kernel

CPU = torch.device("cpu")


def test_a_planned_layer_runs_a_kernel_that_is_registered_again() -> None:
    layer = SiluAndMul()
    layer.plan(CPU, torch.float32)
    x = torch.randn(2, 6)
    before, old = REGISTRY.snapshot(), layer(x)
    try:

        @register_kernel("activation", "silu_and_mul", solution="reference")
        def gate_only(x: Tensor) -> Tensor:
            return x.chunk(2, dim=-1)[0]

        assert torch.equal(layer(x), x[:, :3])
    finally:
        REGISTRY.restore(before)
    assert torch.equal(layer(x), old)


def test_a_new_solution_is_taken_by_the_next_plan() -> None:
    layer = RMSNorm(4, 1e-5)
    layer.to_empty(device=CPU)
    layer.weight.fill_(1)
    layer.plan(CPU, torch.float32)
    x = torch.randn(2, 4)
    before, old = REGISTRY.snapshot(), layer(x)
    try:

        @register_kernel("norm", "rms_norm", solution="better", priority=1)
        def shift(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            return x + weight + eps

        assert torch.equal(layer(x), old)
        layer.plan(CPU, torch.float32)
        assert torch.equal(layer(x), x + 1 + 1e-5)
    finally:
        REGISTRY.restore(before)


def test_norm_with_a_residual_gives_the_norm_of_the_sum_and_the_sum() -> None:
    layer = RMSNorm(4, 1e-5)
    layer.to_empty(device=CPU)
    layer.weight.fill_(2)
    layer.plan(CPU, torch.float32)
    x, residual = torch.randn(3, 4), torch.randn(3, 4)
    out, total = layer(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, layer(total))
