from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed.errors import ModelError
from tokenspeed.runtime.distributed.group import Group
from tokenspeed.runtime.models.base import CausalLM
from tokenspeed.runtime.models.config import ARCHITECTURES, ModelConfig
from tokenspeed.runtime.models.registry import MODELS, build_model

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    model_type="llama",
    vocab_size=11,
    hidden_size=8,
    intermediate_size=6,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
)


def build(**changes: Any) -> CausalLM:
    model = build_model(ModelConfig(**{**vars(CONFIG), **changes}), Group.solo())
    model.materialize(CPU, torch.float32)
    return model


def weights(model: CausalLM) -> dict[str, torch.Tensor]:
    return {name: torch.randn(slot.shape) for name, (_, slot) in model.weight_slots().items()}


def test_every_architecture_that_is_understood_has_a_class() -> None:
    assert set(MODELS) == set(ARCHITECTURES)


def test_a_model_is_built_without_memory() -> None:
    model = build_model(CONFIG, Group.solo())
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_the_weights_it_needs_are_those_of_the_checkpoint() -> None:
    layer = "model.layers.0."
    attention = [f"{layer}self_attn.{name}_proj.weight" for name in "qkvo"]
    mlp = [f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    norms = [f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight", "model.norm.weight"]
    ends = ["model.embed_tokens.weight", "lm_head.weight"]
    assert set(build().weight_slots()) == {*attention, *mlp, *norms, *ends}
    assert set(build(tie_embeddings=True).weight_slots()) == {*attention, *mlp, *norms, ends[0]}
    biases = {name.replace("weight", "bias") for name in (*attention, *mlp)}
    with_biases = build(attention_bias=True, mlp_bias=True).weight_slots()
    assert {name for name in with_biases if name.endswith("bias")} == biases


def test_missing_weights_are_named() -> None:
    model = build()
    have = weights(model)
    del have["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(ModelError, match=r"lacks .*: model.layers.0.self_attn.k_proj.weight; use a complete"):
        model.load_weights(have.items())
    with pytest.raises(ModelError, match=r"lacks .* and 9 more;"):
        model.load_weights([])


def test_unknown_weights_are_named() -> None:
    model = build()
    have = {**weights(model), "model.layers.0.self_attn.q_norm.weight": torch.ones(4)}
    with pytest.raises(ModelError, match=r"has weights that the model does not know: .*q_norm.weight"):
        model.load_weights(have.items())


def test_a_weight_of_another_shape_is_refused() -> None:
    model = build()
    have = {**weights(model), "model.norm.weight": torch.ones(9)}
    with pytest.raises(ModelError, match=r"model.norm.weight has shape \[9\] where config.json asks for \[8\]"):
        model.load_weights(have.items())


def test_a_tied_head_and_old_rope_tables_in_the_checkpoint_are_passed_over() -> None:
    model = build(tie_embeddings=True)
    extra = {
        "lm_head.weight": torch.ones(11, 8),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    model.load_weights({**weights(model), **extra}.items())
    with pytest.raises(ModelError, match=r"lm_head.weight"):
        untied = build()
        have = weights(untied)
        del have["lm_head.weight"]
        untied.load_weights(have.items())


def test_weights_are_converted_to_the_type_of_the_model() -> None:
    model = build()
    model.materialize(CPU, torch.bfloat16)
    have = weights(model)
    model.load_weights(have.items())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.get_parameter("model.norm.weight"), have["model.norm.weight"].bfloat16())


def test_loading_again_replaces_the_weights() -> None:
    model = build()
    model.load_weights(weights(model).items())
    second = weights(model)
    model.load_weights(second.items())
    assert torch.equal(model.get_parameter("lm_head.weight"), second["lm_head.weight"])


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ModelError, match="Mamba is not supported; use one of: LlamaForCausalLM"):
        build(architecture="Mamba")
