"""What one step reads, packed without gaps, so that one copy brings all of it to the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch

Array = TypeVar("Array")

ALIGNMENT = 128
"""Bytes. Every array starts at a multiple of it whatever the sizes, so that kernels specialise on one alignment."""


@dataclass(frozen=True)
class StepShape:
    """Size of one step.

    Attributes:
        num_tokens: tokens that the model computes, padding included.
        num_rows: sequences, padding included.
        max_query_len: most tokens of one sequence; 1 is a decode step, in which token i belongs to sequence i.
        width: blocks of the block table that are visible.
    """

    num_tokens: int
    num_rows: int
    max_query_len: int
    width: int


@dataclass(frozen=True)
class StepInputs(Generic[Array]):
    """The arrays of one step: numpy views on the host, tensors on the device, at the same offsets.

    The arrays from `last_tokens` to `min_p` have one entry for each row that samples, in row order, and the last two
    one for each new block.
    """

    token_ids: Array
    """int64 [tokens]: the input ids that the host knows."""
    id_sources: Array
    """int64 [tokens]: where in `BatchBuffers.id_pool` the input id of a token is."""
    positions: Array
    """int64 [tokens]."""
    slot_mapping: Array
    """int64 [tokens]: KV slot of each token."""
    last_tokens: Array
    """int64 [rows]: the token after which is sampled."""
    sample_rows: Array
    """int64 [rows]: the row that it ends."""
    sample_positions: Array
    """int64 [rows]: index in its sequence of the id to be sampled."""
    seeds: Array
    """int64 [rows]."""
    top_k: Array
    """int64 [rows]."""
    temperature: Array
    """float32 [rows]."""
    top_p: Array
    """float32 [rows]."""
    min_p: Array
    """float32 [rows]."""
    seq_lens: Array
    """int32 [rows]."""
    query_start: Array
    """int32 [rows + 1]."""
    table_places: Array
    """int64 [rows]: where in the flat block tables a block is new; see `BlockTables`."""
    table_blocks: Array
    """int32 [rows]: the new blocks."""


@dataclass(frozen=True)
class Section:
    """Where one array lies in the packed bytes."""

    name: str
    dtype: str
    offset: int
    end: int
    """First byte behind the array."""


_TORCH_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}
_TOKEN_ARRAYS = ("token_ids", "id_sources", "positions", "slot_mapping")
_DTYPES = {
    "temperature": "float32",
    "top_p": "float32",
    "min_p": "float32",
    "seq_lens": "int32",
    "query_start": "int32",
    "table_blocks": "int32",
}


@lru_cache(maxsize=1024)
def layout(num_tokens: int, num_rows: int) -> tuple[Section, ...]:
    """The arrays of a step of this size, in order; `token_ids` begins at 0."""
    sections = []
    offset = 0
    for field in fields(StepInputs):
        dtype = _DTYPES.get(field.name, "int64")
        length = num_tokens if field.name in _TOKEN_ARRAYS else num_rows + (field.name == "query_start")
        section = Section(field.name, dtype, offset, offset + length * np.dtype(dtype).itemsize)
        sections.append(section)
        offset = aligned(section.end)
    return tuple(sections)


def packed_bytes(shape: StepShape) -> int:
    """Bytes that the arrays of a step of this shape take together."""
    return layout(shape.num_tokens, shape.num_rows)[-1].end


def views(shape: StepShape, slice_of: Callable[[Section], Array]) -> StepInputs[Array]:
    """The arrays of a step, each made by `slice_of`."""
    return StepInputs(**{section.name: slice_of(section) for section in layout(shape.num_tokens, shape.num_rows)})


def host_views(shape: StepShape, data: np.ndarray[Any, np.dtype[np.uint8]]) -> StepInputs[np.ndarray[Any, Any]]:
    """numpy arrays in `data`, uint8 [packed_bytes or more]."""
    return views(shape, lambda section: data[section.offset : section.end].view(section.dtype))


def device_views(shape: StepShape, data: torch.Tensor) -> StepInputs[torch.Tensor]:
    """Tensors in `data`, uint8 [packed_bytes or more]."""
    return views(shape, lambda section: data[section.offset : section.end].view(_TORCH_DTYPES[section.dtype]))


def aligned(size: int) -> int:
    """`size` bytes rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT
