"""What one step reads, packed without gaps, so that one copy brings all of it to the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
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

    The arrays from `last_tokens` to `min_p` have one entry for each row that samples, in row order.
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


@dataclass(frozen=True)
class Section:
    """Where one array lies in the packed bytes."""

    name: str
    dtype: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """First byte behind the array."""
        return self.offset + self.length * np.dtype(self.dtype).itemsize


_TOKEN_ARRAYS = ("token_ids", "id_sources", "positions", "slot_mapping")
_DTYPES = {
    "temperature": "float32",
    "top_p": "float32",
    "min_p": "float32",
    "seq_lens": "int32",
    "query_start": "int32",
}


def layout(shape: StepShape) -> tuple[Section, ...]:
    """The arrays of a step of this shape, in order; `token_ids` begins at 0."""
    sections = []
    offset = 0
    for field in fields(StepInputs):
        length = shape.num_tokens if field.name in _TOKEN_ARRAYS else shape.num_rows
        section = Section(field.name, _DTYPES.get(field.name, "int64"), offset, length + (field.name == "query_start"))
        sections.append(section)
        offset = aligned(section.end)
    return tuple(sections)


def packed_bytes(shape: StepShape) -> int:
    """Bytes that the arrays of a step of this shape take together."""
    return layout(shape)[-1].end


def views(shape: StepShape, slice_of: Callable[[Section], Array]) -> StepInputs[Array]:
    """The arrays of a step, each made by `slice_of`."""
    return StepInputs(**{section.name: slice_of(section) for section in layout(shape)})


def host_views(shape: StepShape, data: np.ndarray[Any, np.dtype[np.uint8]]) -> StepInputs[np.ndarray[Any, Any]]:
    """numpy arrays in `data`, uint8 [packed_bytes or more]."""
    return views(shape, lambda section: data[section.offset : section.end].view(section.dtype))


def device_views(shape: StepShape, data: torch.Tensor) -> StepInputs[torch.Tensor]:
    """Tensors in `data`, uint8 [packed_bytes or more]."""
    return views(shape, lambda section: data[section.offset : section.end].view(getattr(torch, section.dtype)))


def aligned(size: int) -> int:
    """`size` bytes rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT
