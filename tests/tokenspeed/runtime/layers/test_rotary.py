from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed.runtime.layers.norm import RMSNorm
from tokenspeed.runtime.layers.rotary import RotaryEmbedding

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 1e5), (128, 5e5)])
def test_angles_are_those_of_transformers(head_dim: int, theta: float, scaling: Any) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=4096)
    config.rope_parameters = rope
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(4096).unsqueeze(0))
    layer = RotaryEmbedding(head_dim, 4096, theta, scaling)
    layer.plan(CPU, torch.float32)
    want = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), -1)
    torch.testing.assert_close(layer.cos_sin, want, rtol=0, atol=1e-3)
    torch.testing.assert_close(layer.cos_sin[:64], want[:64], rtol=0, atol=1e-5)


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    layer = RotaryEmbedding(8, 100, 100.0, None)
    layer.plan(CPU, torch.float32)
    query, key, value = torch.randn(3, 1, 2, 8).unbind()
    cache = torch.zeros(3, 2, 2, 8), torch.zeros(3, 2, 2, 8)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        slot = torch.tensor([3])
        turned = layer(torch.tensor([query_position]), query, key, value, cache, slot)
        layer(torch.tensor([key_position]), query, key, value, cache, slot)
        torch.testing.assert_close(turned.norm(dim=-1), query.norm(dim=-1))
        assert torch.equal(cache[1][1, 1], value[0])
        return (turned[0] * cache[0][1, 1]).sum(-1)

    torch.testing.assert_close(score(17, 5), score(72, 60), rtol=1e-4, atol=1e-4)


def test_heads_are_normalised_before_they_are_rotated() -> None:
    layer = RotaryEmbedding(8, 100, 100.0, None)
    layer.plan(CPU, torch.float32)
    norms = RMSNorm(8, 1e-6), RMSNorm(8, 1e-6)
    for norm in norms:
        norm.to_empty(device=CPU)
        norm.weight.normal_()
        norm.plan(CPU, torch.float32)
    query, key, value = torch.randn(3, 4, 2, 8).unbind()
    positions, slots = torch.tensor([3, 9, 0, 50]), torch.tensor([2, 5, 1, 4])
    fused, plain = ((torch.zeros(3, 2, 2, 8), torch.zeros(3, 2, 2, 8)) for _ in range(2))
    got = layer(positions, query, key, value, fused, slots, norms)
    want = layer(positions, norms[0](query), norms[1](key), value, plain, slots)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(fused, plain)
