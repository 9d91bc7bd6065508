from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tokenspeed.runtime.config import ModelOptions
from tokenspeed.runtime.loader.source import ModelSource, resolve

Tensors = Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]
WriteGGUF = Callable[..., Path]

HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory of the test's own."""
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    """The real model, from the user's own cache (downloaded there by whoever needs it first)."""
    return resolve(ModelOptions(model="smollm2"), print)


@pytest.fixture
def tiny_llama() -> LlamaForCausalLM:
    """A random Llama with grouped-query attention, biases and an LM head of its own."""
    return make_llama()


def make_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "eos_token_id": 5,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.05)  # transformers starts biases at 0 and norms at 1, which hides a mix-up
    return model


@pytest.fixture(name="make_llama")
def make_llama_fixture() -> Callable[..., LlamaForCausalLM]:
    return make_llama


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGGUF:
    """Writes a GGUF file with the given tensors and the metadata of a small llama; returns its path."""

    def write(
        tensors: Tensors | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        architecture: str = "llama",
        name: str = "model.gguf",
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in {**llama_metadata(), **(metadata or {})}.items():
            if value is not None:
                add_value(writer, key, value)
        for tensor_name, (values, kind) in (llama_tensors() if tensors is None else tensors).items():
            writer.add_tensor(tensor_name, gguf.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def llama_metadata() -> dict[str, Any]:
    return {
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
    }


def llama_tensors(
    model: LlamaForCausalLM | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]:
    """The weights of `model` as llama.cpp's converter lays them out, matrices as `kind`, vectors as F32."""
    model = model or make_llama()
    config = model.config
    tensors = {}
    for hf_name, tensor in model.state_dict().items():
        values = tensor.numpy().copy()
        module, _, parameter = hf_name.rpartition(".")
        if module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
            values = interleave_halves(values, heads)
        prefix, layer, rest = "", "", module
        if module.startswith("model.layers."):
            _, _, layer, rest = module.split(".", 3)
            prefix = f"blk.{layer}."
        tensors[f"{prefix}{HF_TO_GGUF[rest]}.{parameter}"] = (
            values,
            kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32,
        )
    return tensors


def interleave_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows h0..hn of the two halves of each head, taken in turn: a0 b0 a1 b1 ..."""
    out = np.empty_like(values)
    size = values.shape[0] // heads
    for head in range(heads):
        rows = values[head * size : (head + 1) * size]
        out[head * size : (head + 1) * size : 2] = rows[: size // 2]
        out[head * size + 1 : (head + 1) * size : 2] = rows[size // 2 :]
    return out


@pytest.fixture(name="llama_tensors")
def llama_tensors_fixture() -> Callable[..., dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]]:
    return llama_tensors
