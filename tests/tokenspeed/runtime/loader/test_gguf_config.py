from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tokenspeed.errors import ModelError
from tokenspeed.runtime.loader.gguf_config import hf_config, hf_generation_config
from tokenspeed.runtime.loader.gguf_file import open_gguf
from tokenspeed.runtime.loader.source import ModelSource
from tokenspeed.runtime.models.config import ModelConfig

WriteGGUF = Callable[..., Path]
F32, F16, Q8_0 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "Q8_0"))


def read(path: Path) -> ModelConfig:
    return ModelConfig.from_hf(hf_config(open_gguf(path)))


def test_smollm2(smollm2: ModelSource) -> None:
    assert smollm2.config == ModelConfig(
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


def test_what_only_the_tensors_tell(
    write_gguf: WriteGGUF, llama_tensors: Callable[..., Any], make_llama: Callable[..., Any]
) -> None:
    with_all = read(write_gguf(name="a.gguf"))
    assert with_all.vocab_size == 96
    assert (with_all.attention_bias, with_all.mlp_bias, with_all.tie_embeddings) == (True, True, False)
    bare = llama_tensors(make_llama(attention_bias=False, mlp_bias=False, tie_word_embeddings=True))
    bare.pop("output.weight")
    without = read(write_gguf(bare, name="b.gguf"))
    assert (without.attention_bias, without.mlp_bias, without.tie_embeddings) == (False, False, True)


@pytest.mark.parametrize(("kind", "dtype"), [(F32, "float32"), (F16, "float16"), (Q8_0, "bfloat16")])
def test_the_type_is_that_of_the_matrices(
    write_gguf: WriteGGUF, llama_tensors: Callable[..., Any], kind: gguf.GGMLQuantizationType, dtype: str
) -> None:
    assert read(write_gguf(llama_tensors(kind=kind))).torch_dtype == dtype


def test_optional_keys(write_gguf: WriteGGUF) -> None:
    config = read(
        write_gguf(
            metadata={
                "llama.attention.head_count_kv": None,
                "llama.attention.key_length": 32,
                "llama.rope.freq_base": 500000.0,
                "llama.rope.scaling.type": "linear",
                "llama.rope.scaling.factor": 4.0,
            }
        )
    )
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 32, 500000.0)
    assert config.rope_scaling == {"rope_type": "linear", "factor": 4.0}


def test_one_number_for_each_layer_is_taken_if_all_agree(write_gguf: WriteGGUF) -> None:
    assert read(write_gguf(metadata={"llama.attention.head_count_kv": [2, 2]})).num_kv_heads == 2
    with pytest.raises(ModelError, match=r"head_count_kv = \[2, 4\]"):
        read(write_gguf(metadata={"llama.attention.head_count_kv": [2, 4]}))


def test_every_token_that_ends_a_text_counts(write_gguf: WriteGGUF) -> None:
    path = write_gguf(
        metadata={
            "tokenizer.ggml.eos_token_id": 7,
            "tokenizer.ggml.eot_token_id": 9,
            "tokenizer.ggml.eom_token_id": 7,
            "tokenizer.ggml.bos_token_id": 0,
            "general.sampling.temp": 0.5,
            "general.sampling.top_k": 40,
        }
    )
    config = read(path)
    assert (config.eos_token_ids, config.bos_token_id, config.pad_token_id) == ((7, 9), 0, None)
    generation = hf_generation_config(open_gguf(path))
    assert (generation["eos_token_id"], generation["temperature"], generation["top_k"]) == ([7, 9], 0.5, 40)
    assert "top_p" not in generation


def test_llama3_scaling_is_recognised_by_its_factors(write_gguf: WriteGGUF, llama_tensors: Callable[..., Any]) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    reference = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": 500000.0, **scaling},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](reference, torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 128, 2) / 128)
    factors = (plain / scaled).numpy().astype(np.float32)
    metadata = {"llama.attention.key_length": 128, "llama.rope.freq_base": 500000.0}
    tensors = {**llama_tensors(), "rope_freqs.weight": (factors, F32)}
    assert read(write_gguf(tensors, metadata)).rope_scaling == scaling
    tensors["rope_freqs.weight"] = (np.linspace(1, 8, 64, dtype=np.float32), F32)
    with pytest.raises(ModelError, match="RoPE factors other than Llama 3's"):
        read(write_gguf(tensors, metadata))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": None}, r"no llama\.block_count"),
        ({"llama.embedding_length": 0}, r"embedding_length = 0"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.dimension_count": 8}, "partial RoPE"),
        ({"llama.rope.scaling.type": "yarn"}, "RoPE scaling yarn"),
        ({"split.count": 3}, "gguf-split --merge"),
    ],
)
def test_what_is_not_supported_is_named(write_gguf: WriteGGUF, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(write_gguf(metadata=metadata))


def test_another_architecture_is_named(write_gguf: WriteGGUF) -> None:
    with pytest.raises(ModelError, match=r"architecture gemma3; supported in GGUF files: llama"):
        read(write_gguf(architecture="gemma3"))


def test_a_missing_tensor_is_named(write_gguf: WriteGGUF) -> None:
    with pytest.raises(ModelError, match=r"no tensor token_embd\.weight"):
        read(write_gguf(tensors={}))
