from __future__ import annotations

from typing import Any

import pytest
import torch

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
    query, key = torch.randn(1, 2, 8), torch.randn(1, 2, 8)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        turned, _ = layer(torch.tensor([query_position]), query, key)
        _, other = layer(torch.tensor([key_position]), query, key)
        torch.testing.assert_close(turned.norm(dim=-1), query.norm(dim=-1))
        return (turned * other).sum(-1)

    torch.testing.assert_close(score(17, 5), score(72, 60), rtol=1e-4, atol=1e-4)
