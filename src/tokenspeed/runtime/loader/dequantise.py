"""From the blocks of a GGUF tensor to floating point.

Block layouts: ggml-common.h of ggml. The common ones are done here, in pieces that stay in the CPU's cache;
the `gguf` package does the others, several times slower. It is numpy rather than torch, because
memory is the bound and torch's threads, which wait for each other after every operation, crawl on a busy machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from tokenspeed.errors import ModelError

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_PIECE_BLOCKS = 4096


def dequantise(raw: np.ndarray, kind: GGMLQuantizationType) -> torch.Tensor:
    """Values of the tensor whose rows are `raw`.

    Args:
        raw: uint8 [rows, bytes of a row], usually a view of the mapped file.
        kind: the type of its blocks.

    Returns:
        [rows, columns] on the CPU: a view of `raw` in its own type for F32, F16 and BF16, else float32.

    Raises:
        ModelError: for a type that is not supported.
    """
    if kind in _PLAIN:
        return torch.from_numpy(raw).view(_PLAIN[kind])
    if kind in _LAYOUTS:
        return torch.from_numpy(_from_blocks(raw, kind))
    try:
        return torch.from_numpy(dequantize(raw, kind))
    except NotImplementedError as error:
        raise ModelError(f"GGUF type {kind.name} is not supported; use another quantisation") from error


def _from_blocks(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    layout = _LAYOUTS[kind]
    blocks = raw.reshape(-1, block_bytes)
    halves = blocks.view(np.float16)
    values = np.empty((blocks.shape[0], block_size), np.float32)
    for start in range(0, blocks.shape[0], _PIECE_BLOCKS):
        piece = slice(start, start + _PIECE_BLOCKS)
        scale = halves[piece, :1].astype(np.float32)
        layout.scale(blocks[piece, 2 * layout.num_halves :], scale, values[piece])
        if layout.num_halves == 2:
            values[piece] += halves[piece, 1:2]
    return values.reshape(raw.shape[0], -1)


def _scale_nibbles(packed: np.ndarray, scale: np.ndarray, out: np.ndarray) -> None:
    """The low nibbles are the first half of a block, the high ones the second."""
    half = packed.shape[1]
    np.multiply(packed & 0x0F, scale, out=out[:, :half])
    np.multiply(packed >> 4, scale, out=out[:, half:])


def _scale_centred_nibbles(packed: np.ndarray, scale: np.ndarray, out: np.ndarray) -> None:
    half = packed.shape[1]
    np.multiply((packed & 0x0F).view(np.int8) - 8, scale, out=out[:, :half])
    np.multiply((packed >> 4).view(np.int8) - 8, scale, out=out[:, half:])


def _scale_bytes(packed: np.ndarray, scale: np.ndarray, out: np.ndarray) -> None:
    np.multiply(packed.view(np.int8), scale, out=out)


@dataclass(frozen=True)
class _Layout:
    """A block is a float16 scale, perhaps a float16 minimum, and packed integers.

    A value is scale * integer + minimum.
    """

    num_halves: int
    scale: Callable[[np.ndarray, np.ndarray, np.ndarray], None]
    """From uint8 [blocks, packed bytes] and float32 [blocks, 1] into float32 [blocks, values of a block]."""


_LAYOUTS = {
    GGMLQuantizationType.Q4_0: _Layout(1, _scale_centred_nibbles),
    GGMLQuantizationType.Q4_1: _Layout(2, _scale_nibbles),
    GGMLQuantizationType.Q8_0: _Layout(1, _scale_bytes),
}
