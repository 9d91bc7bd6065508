"""The tensors of a GGUF file under their Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import torch

from tokenspeed.errors import ModelError
from tokenspeed.runtime.loader.dequantise import dequantise
from tokenspeed.runtime.loader.gguf_config import ROPE_FACTORS
from tokenspeed.runtime.loader.gguf_file import GGUFFile, GGUFTensor
from tokenspeed.runtime.models.config import ModelConfig

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")


def gguf_weights(file: GGUFFile, config: ModelConfig, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight as (Hugging Face name, full tensor on `device`), in the order of the file.

    Quantised ones come as float32, others in their own type, on a CPU as views of the mapped file.

    Raises:
        ModelError: for a tensor whose name or type is not known.
    """
    for tensor in sorted(file.tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.name == ROPE_FACTORS:
            continue
        yield hf_name(tensor.name, file), _values(file, tensor, config, device)


def hf_name(name: str, file: GGUFFile) -> str:
    """The Hugging Face name of the GGUF tensor `name`.

    Raises:
        ModelError: for a name that the llama architecture does not have.
    """
    match = _NAME.fullmatch(name)
    if match:
        layer, module, kind = match["layer"], match["module"], match["kind"]
        if layer is None and module in _TOP:
            return f"{_TOP[module]}.{kind}"
        if layer is not None and module in _BLOCK:
            return f"model.layers.{layer}.{_BLOCK[module]}.{kind}"
    raise ModelError(f"{file.path} has an unknown tensor {name}; use a model of plain llama architecture")


def _values(file: GGUFFile, tensor: GGUFTensor, config: ModelConfig, device: torch.device) -> torch.Tensor:
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    raw = np.frombuffer(file.data(tensor), dtype=np.uint8).reshape(rows, -1)
    module = tensor.name.rsplit(".", 2)[-2]
    if module in ("attn_q", "attn_k"):
        raw = _rotate_half_order(raw, config.num_heads if module == "attn_q" else config.num_kv_heads, tensor)
    return dequantise(raw, tensor.type).view(tensor.shape).to(device)


def _rotate_half_order(raw: np.ndarray, num_heads: int, tensor: GGUFTensor) -> np.ndarray:
    """Undo llama.cpp's order of the rows of a head, in which the two halves of a rotary pair are neighbours.

    Blocks never cross rows, so that the raw bytes can be moved before they are dequantised.
    """
    if tensor.shape[0] % (2 * num_heads):
        raise ModelError(f"GGUF tensor {tensor.name} has {tensor.shape[0]} rows, but {num_heads} heads share it")
    pairs = raw.reshape(num_heads, tensor.shape[0] // (2 * num_heads), 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(raw.shape)
