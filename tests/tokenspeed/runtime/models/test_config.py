from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.errors import ConfigError, ModelError
from tokenspeed.runtime.models.config import ModelConfig

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**SMOLLM2, **changes})


def test_a_config_json() -> None:
    assert read() == ModelConfig(
        architecture="LlamaForCausalLM",
        model_type="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        max_position=8192,
        tie_embeddings=True,
        eos_token_ids=(2,),
        bos_token_id=1,
        pad_token_id=2,
        torch_dtype="bfloat16",
    )


def test_a_configuration_object_says_the_same_as_its_file() -> None:
    from transformers import LlamaConfig

    assert ModelConfig.from_hf(LlamaConfig.from_dict(dict(SMOLLM2)).to_dict()) == read()
    scaled = LlamaConfig.from_dict({**SMOLLM2, "rope_scaling": dict(LLAMA3)})
    assert ModelConfig.from_hf(scaled.to_dict()) == read(rope_scaling=LLAMA3)


BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.mark.parametrize("tied", [False, True])
def test_a_qwen3_configuration(tied: bool) -> None:
    from transformers import Qwen3Config

    theirs = Qwen3Config(
        architectures=["Qwen3ForCausalLM"], num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=tied
    )
    config = ModelConfig.from_hf(theirs.to_dict())
    assert (config.architecture, config.head_dim, config.tie_embeddings) == ("Qwen3ForCausalLM", 128, tied)
    # A config.json without a head_dim has that of transformers, not hidden_size / heads.
    raw = {name: value for name, value in theirs.to_dict().items() if name != "head_dim"}
    assert ModelConfig.from_hf(raw).head_dim == Qwen3Config.from_dict(raw).head_dim == 128


def test_what_may_be_absent() -> None:
    few = {
        name: SMOLLM2[name]
        for name in ("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                     "num_attention_heads")
    }  # fmt: skip
    config = ModelConfig.from_hf(few)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (9, 64, 10000.0)
    assert (config.eos_token_ids, config.bos_token_id, config.torch_dtype) == ((), None, "float32")
    assert (config.rope_scaling, config.tie_embeddings, config.max_position) == (None, False, 2048)


def test_several_end_tokens_and_a_head_dim_of_its_own() -> None:
    config = read(eos_token_id=[7, 8], head_dim=32)
    assert config.eos_token_ids == (7, 8)
    assert config.head_dim == 32


@pytest.mark.parametrize("rope_field", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_in_the_old_and_in_the_new_place(rope_field: str) -> None:
    assert read(**{rope_field: LLAMA3}).rope_scaling == LLAMA3
    assert read(**{rope_field: {"type": "linear", "factor": 2}}).rope_scaling == {
        "rope_type": "linear",
        "factor": 2.0,
    }
    assert read(**{rope_field: {"rope_type": "default"}}).rope_scaling is None


def test_the_base_in_rope_parameters_wins() -> None:
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "names MambaForCausalLM; use a model of one of: LlamaFor"),
        ({"architectures": None}, "names no architecture"),
        ({"hidden_act": "gelu"}, "hidden_act gelu; only models with silu"),
        ({"use_sliding_window": True}, "attention in a sliding window; only full attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "attention in a sliding window"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with gptq; use an unquantised one"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8 weights in blocks of None; use one with e4m3"),
        (
            {"quantization_config": {**BLOCK_FP8, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.up_proj"]}},
            "leaves model.layers.0.mlp.up_proj unquantised",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "type yarn; supported are default, linear, llama3",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "needs low_freq_factor as a number above 0",
        ),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor is not below"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs factor as a number above 0, not None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5; only 1"),
        ({"num_key_value_heads": 4}, "9 attention heads and 4 KV heads"),
        ({"hidden_size": 577}, "needs head_dim, since 9 heads do not divide hidden_size 577"),
        ({"head_dim": 63}, "head_dim 63; rotary embedding needs an even number"),
        ({"vocab_size": None}, "needs vocab_size as a whole number above 0, not None"),
        ({"num_hidden_layers": 0}, "needs num_hidden_layers as a whole number above 0, not 0"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn; supported are float32"),
        ({"eos_token_id": "</s>"}, "where a token id or a list of them belongs"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(**changes)


def test_ranks_that_do_not_fit_are_refused_with_those_that_do() -> None:
    config = read(num_attention_heads=12, num_key_value_heads=4, intermediate_size=48, head_dim=64)
    for ranks in (1, 2, 4, 12):
        config.check_tensor_parallel(ranks)
    for ranks in (3, 5, 8, 24):
        with pytest.raises(ConfigError, match=f"size {ranks} does not fit 12 .* use one of: 1, 2, 4, 12$"):
            config.check_tensor_parallel(ranks)
    assert [config.local_kv_heads(ranks) for ranks in (1, 2, 4, 12)] == [4, 2, 1, 1]


def test_ranks_that_would_cut_a_float8_block_are_refused() -> None:
    form = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1024}
    config = read(quantization_config=form, **sizes)
    for ranks in (1, 2):
        config.check_tensor_parallel(ranks)
    for ranks in (4, 8):  # one KV head of 64 is no block of 128
        with pytest.raises(ConfigError, match=r"in float8 blocks of 128; use one of: 1, 2$"):
            config.check_tensor_parallel(ranks)
    config = read(quantization_config=form, **{**sizes, "intermediate_size": 1000})
    with pytest.raises(ConfigError, match=r"in float8 blocks of 128; use an unquantised checkpoint$"):
        config.check_tensor_parallel(1)
