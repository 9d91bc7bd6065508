"""GGUF metadata, said as the config.json and generation_config.json of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from tokenspeed.errors import ModelError
from tokenspeed.runtime.loader.gguf_file import GGUFFile, GGUFTensor

ARCHITECTURES = {"llama": "LlamaForCausalLM"}
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor by which a GGUF file states Llama 3's RoPE scaling: one divisor for each rotary frequency."""

_FLOAT_TYPES = {GGMLQuantizationType.F32: "float32", GGMLQuantizationType.F16: "float16"}
_END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_SAMPLING_KEYS = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k"}

# llama.cpp's converter writes the factors, not the numbers they come from; all of Llama 3 has these.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """What config.json would say of the model in `file`.

    Raises:
        ModelError: for an architecture or an option that is not supported, or metadata that is missing.
    """
    metadata = file.metadata
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(f"{file.path} has architecture {name}; supported in GGUF files: {', '.join(ARCHITECTURES)}")
    if metadata.get("split.count", 1) > 1:
        raise ModelError(f"{file.path} is one part of several; join them with llama.cpp's gguf-split --merge")
    read = _Reader(file, name)
    num_heads = read.size("attention.head_count")
    hidden_size = read.size("embedding_length")
    head_dim = read.optional("attention.key_length") or hidden_size // num_heads
    _refuse_unsupported(read, head_dim)
    return {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "vocab_size": read.tensor_shape("token_embd.weight")[0],
        "hidden_size": hidden_size,
        "intermediate_size": read.size("feed_forward_length"),
        "num_hidden_layers": read.size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": read.size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest_float32(read.required("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": read.size("context_length"),
        "rope_theta": _shortest_float32(read.optional("rope.freq_base") or 10000.0),
        "rope_scaling": _rope_scaling(read, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "dtype": _FLOAT_TYPES.get(read.tensor_type("blk.0.attn_q.weight"), "bfloat16"),
        **_token_ids(metadata),
    }


def hf_generation_config(file: GGUFFile) -> dict[str, Any]:
    """What generation_config.json would say: the token ids that begin, end and pad, and sampling defaults."""
    metadata = file.metadata
    sampling = {name: metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING_KEYS.items()}
    return {**_token_ids(metadata), **{name: value for name, value in sampling.items() if value is not None}}


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    ends = list(dict.fromkeys(metadata[key] for key in _END_KEYS if key in metadata))
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


class _Reader:
    """Looks up the keys of one architecture."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def optional(self, key: str) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, list) and value and len(set(value)) == 1:
            return value[0]  # a value for each layer, the same for all
        return value

    def required(self, key: str) -> Any:
        value = self.optional(key)
        if value is None:
            raise ModelError(f"{self.file.path} has no {self.architecture}.{key}; convert the model again")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.required(key) if default is None else self.optional(key)
        value = default if value is None else value
        if not isinstance(value, int) or value <= 0:
            raise ModelError(
                f"{self.file.path} has {self.architecture}.{key} = {str(value)[:40]}; "
                "only models with one whole number above 0 there are supported"
            )
        return value

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def tensor_type(self, name: str) -> GGMLQuantizationType:
        return self._tensor(name).type

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self.file.tensors:
            raise ModelError(f"{self.file.path} has no tensor {name}; convert the model again")
        return self.file.tensors[name]


def _refuse_unsupported(read: _Reader, head_dim: int) -> None:
    if read.optional("expert_count"):
        raise ModelError(f"{read.file.path} is a mixture of experts; only dense models are supported")
    rotary = read.optional("rope.dimension_count")
    if rotary not in (None, head_dim):
        raise ModelError(f"{read.file.path} has partial RoPE ({rotary} of {head_dim}); only full RoPE is supported")


def _rope_scaling(read: _Reader, head_dim: int) -> dict[str, Any] | None:
    kind = read.optional("rope.scaling.type")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(read.required("rope.scaling.factor"))}
    if kind not in (None, "none"):
        raise ModelError(f"{read.file.path} has RoPE scaling {kind}; supported are none, linear and Llama 3's")
    if ROPE_FACTORS not in read.file.tensors:
        return None
    stated = np.frombuffer(read.file.data(read.file.tensors[ROPE_FACTORS]), dtype=np.float32)
    factor = float(stated.max())
    theta = read.optional("rope.freq_base") or 10000.0
    if not np.allclose(stated, _llama3_factors(theta, head_dim, factor), rtol=1e-3):
        raise ModelError(f"{read.file.path} has RoPE factors other than Llama 3's; they are not supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }


def _llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """Divisor of each of the `head_dim / 2` rotary frequencies under Llama 3's scaling by `factor`.

    Source: the formula of Llama 3.1's reference code (`apply_scaling`).
    """
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (_LLAMA3_ORIGINAL / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    blended = 1 / ((1 - smooth) / factor + smooth)
    return np.where(smooth <= 0, factor, np.where(smooth >= 1, 1.0, blended))


def _shortest_float32(value: float) -> float:
    """The shortest decimal with the same float32: 1e-5 where the file says 9.999999747378752e-06."""
    return float(str(np.float32(value)))
