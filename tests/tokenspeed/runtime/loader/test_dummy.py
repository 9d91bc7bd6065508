from __future__ import annotations

import torch

from tokenspeed.runtime.loader.dummy import dummy_weights

CPU = torch.device("cpu")
SHAPES = {
    "model.embed_tokens.weight": (300, 200),
    "model.layers.0.self_attn.q_proj.weight": (200, 200),
    "model.layers.0.self_attn.q_proj.bias": (200,),
    "model.layers.0.self_attn.q_norm.weight": (64,),
    "model.layers.1.self_attn.q_proj.weight": (200, 200),
    "model.norm.weight": (200,),
}


def make(seed: int = 1, dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return dict(dummy_weights(shapes or SHAPES, seed, CPU, dtype))


def test_shapes_types_and_sizes() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weights = make(dtype=dtype)
        assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == SHAPES
        assert {tensor.dtype for tensor in weights.values()} == {dtype}
        embedding = weights["model.embed_tokens.weight"].float()
        assert abs(embedding.mean().item()) < 5e-4
        assert abs(embedding.std().item() - 0.02) < 5e-4


def test_norms_are_ones() -> None:
    weights = make()
    assert torch.equal(weights["model.norm.weight"], torch.ones(200))
    assert torch.equal(weights["model.layers.0.self_attn.q_norm.weight"], torch.ones(64))


def test_a_weight_follows_from_the_seed_and_its_name_alone() -> None:
    first, again, other = make(seed=1), make(seed=1), make(seed=2)
    assert all(torch.equal(first[name], again[name]) for name in SHAPES)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert not torch.equal(
        first["model.layers.0.self_attn.q_proj.weight"], first["model.layers.1.self_attn.q_proj.weight"]
    )
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(make(seed=1, **{name: SHAPES[name]})[name], first[name])
