"""The tensors of a GGUF file under their Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES

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


class GGUFWeight:
    """A tensor of a GGUF file; only the blocks of the part that is taken are read and dequantised.

    Quantised ones come as float32, others in their own type, on a CPU as views of the mapped file where that is
    possible. Rows of the query and key projections come in the order of Hugging Face checkpoints.
    """

    def __init__(self, file: GGUFFile, tensor: GGUFTensor, config: ModelConfig, device: torch.device) -> None:
        self._file = file
        self._tensor = tensor
        self._config = config
        self._device = device

    @property
    def shape(self) -> Sequence[int]:
        """Of the whole tensor."""
        return self._tensor.shape

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Indices `start` to `start + length` along `dim`, on the device.

        Raises:
            ModelError: for a type that is not supported, or rows that the heads cannot share.
        """
        if length == 0:  # of a rank that the vocabulary does not reach
            return self.narrow(dim, 0, 1).narrow(dim, 0, 0)
        if len(self.shape) == 1:
            return self._part(slice(None), slice(None)).view(*self.shape).narrow(dim, start, length)
        part = slice(start, start + length)
        return self._part(part, slice(None)) if dim == 0 else self._part(slice(None), part)

    def _part(self, rows: slice, columns: slice) -> torch.Tensor:
        """Some rows and columns; of a vector all, as one row."""
        num_rows = self.shape[0] if len(self.shape) > 1 else 1
        raw = np.frombuffer(self._file.data(self._tensor), dtype=np.uint8).reshape(num_rows, -1)
        raw = self._in_order(raw, *rows.indices(num_rows)[:2])
        block_size, block_bytes = GGML_QUANT_SIZES[self._tensor.type]
        first, end, _ = columns.indices(self.shape[-1])
        first_block, end_block = first // block_size, -(-end // block_size)
        blocks = np.ascontiguousarray(raw[:, first_block * block_bytes : end_block * block_bytes])
        offset = first_block * block_size
        return dequantise(blocks, self._tensor.type)[:, first - offset : end - offset].to(self._device)

    def _in_order(self, raw: np.ndarray, first: int, end: int) -> np.ndarray:
        """Rows `first` to `end`, for which those of whole heads have to be moved."""
        module = self._tensor.name.rsplit(".", 2)[-2]
        heads = {"attn_q": self._config.num_heads, "attn_k": self._config.num_kv_heads}.get(module)
        if heads is None:
            return raw[first:end]
        if self.shape[0] % (2 * heads):
            raise ModelError(f"GGUF tensor {self._tensor.name} has {self.shape[0]} rows, but {heads} heads share it")
        if len(self.shape) == 1:
            return _rotate_half_order(raw.reshape(self.shape[0], -1), heads).reshape(raw.shape)
        size = self.shape[0] // heads
        first_head, end_head = first // size, -(-end // size)
        whole = _rotate_half_order(raw[first_head * size : end_head * size], end_head - first_head)
        return whole[first - first_head * size : end - first_head * size]


def gguf_weights(file: GGUFFile, config: ModelConfig, device: torch.device) -> Iterator[tuple[str, GGUFWeight]]:
    """Every weight with its Hugging Face name, in the order of the file.

    Raises:
        ModelError: for a tensor whose name is not known.
    """
    for tensor in sorted(file.tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.name == ROPE_FACTORS:
            continue
        yield hf_name(tensor.name, file), GGUFWeight(file, tensor, config, device)


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


def _rotate_half_order(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of a head, in which the two halves of a rotary pair are neighbours.

    Blocks never cross rows, so that the raw bytes can be moved before they are dequantised.
    """
    pairs = rows.reshape(num_heads, rows.shape[0] // (2 * num_heads), 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
