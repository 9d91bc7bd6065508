"""The static tensors that a step reads and writes, so that a captured step finds its inputs where they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tokenspeed.runtime.execution.block_tables import BlockTables
from tokenspeed.runtime.execution.dummy import dummy_rows
from tokenspeed.runtime.execution.inputs import (
    StepInputs,
    StepShape,
    aligned,
    device_views,
    host_views,
    packed_bytes,
)
from tokenspeed.runtime.execution.sampling_columns import SamplingColumns
from tokenspeed.runtime.layers.context import ForwardContext
from tokenspeed.runtime.scheduler.batch import Batch, Row

MOST_VIEWS = 256
"""Shapes whose tensors are kept."""

HostInputs = StepInputs[np.ndarray[Any, Any]]
DeviceInputs = StepInputs[torch.Tensor]


@dataclass(frozen=True)
class BufferLimits:
    """Largest step that the buffers take."""

    max_tokens: int
    max_rows: int
    max_blocks_per_row: int


class BatchBuffers:
    """Inputs of a step, written by `fill` on the host, and the ids that it samples.

    `sampled` is int64 [max_rows]: the id that each row of the last step sampled. It stays on the device, where the
    next step finds the ids that the host does not know yet.
    """

    def __init__(self, limits: BufferLimits, block_size: int, device: torch.device):
        self.limits = limits
        self.block_size = block_size
        self.device = device
        self.tables = BlockTables(limits.max_rows, limits.max_blocks_per_row, device)
        self.columns = SamplingColumns()
        self._views: dict[StepShape, DeviceInputs] = {}

    def allocate(self) -> None:
        """Make the tensors."""
        self._views.clear()
        ids = aligned(self.limits.max_rows * 8)
        largest = StepShape(self.limits.max_tokens, self.limits.max_rows, self.limits.max_tokens, 0)
        self._storage = torch.zeros(ids + packed_bytes(largest), dtype=torch.uint8, device=self.device)
        self._packed = self._storage[ids:]
        self._first_known = ids // 8
        self._known = np.arange(self._first_known, self._first_known + self.limits.max_tokens)
        self._ids = self._storage[: ids + self.limits.max_tokens * 8].view(torch.int64)
        self.sampled = self._ids[: self.limits.max_rows]
        self.tables.allocate()

    def inputs(self, shape: StepShape) -> DeviceInputs:
        """The tensors that a step of this shape reads."""
        found = self._views.get(shape)
        if found is None:
            found = device_views(shape, self._packed)
            # The captured shapes come first, and again and again; eager ones hardly ever come twice.
            if len(self._views) < MOST_VIEWS:
                self._views[shape] = found
        return found

    def id_pool(self, shape: StepShape) -> torch.Tensor:
        """int64: `sampled`, a gap, then the `token_ids` of a step of this shape; `id_sources` are indices of it."""
        return self._ids[: self._first_known + shape.num_tokens]

    def context(
        self, shape: StepShape, inputs: DeviceInputs, kv: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> ForwardContext:
        """What the attention layers read."""
        return ForwardContext(
            kv=kv,
            slot_mapping=inputs.slot_mapping,
            block_tables=self.tables.device_table[: shape.num_rows, : shape.width],
            seq_lens=inputs.seq_lens,
            query_start=inputs.query_start,
            max_query_len=shape.max_query_len,
            logits_rows=inputs.last_tokens,
        )

    def fill(self, batch: Batch, shape: StepShape) -> DeviceInputs:
        """Write the inputs of `batch`, padded to `shape`, and return the tensors that hold them.

        Padding tokens are id 0 at position 0 and write to the scratch block; padding rows have length 0.
        """
        data, host = self._host(shape)
        tokens = _fill_rows(host, batch, self.block_size)
        host.token_ids[tokens:] = 0
        host.positions[tokens:] = 0
        host.slot_mapping[tokens:] = 0
        host.id_sources[:] = self._known[: shape.num_tokens]
        sources = [row.source_row for row in batch.rows[: batch.num_decode_rows]]
        for index, source in enumerate(sources):
            if source is not None:
                host.id_sources[index] = source
        rows = len(batch.rows)
        host.seq_lens[rows:] = 0
        # In a decode step token i is sequence i, padding included; elsewhere padding rows are empty.
        host.query_start[rows + 1 :] = np.arange(rows + 1, shape.num_rows + 1) if shape.max_query_len == 1 else tokens
        self.columns.fill(host, batch)
        places, blocks = self.tables.changes(batch.rows)
        fits = len(places) <= shape.num_rows
        if fits:
            host.table_places[: len(places)] = places
            host.table_blocks[: len(blocks)] = blocks
        self._send(data)
        inputs = self.inputs(shape)
        if len(places) and fits:
            self.tables.write(inputs.table_places[: len(places)], inputs.table_blocks[: len(places)])
        elif len(places):
            self.tables.write(self._to_device(places), self._to_device(blocks))
        return inputs

    def fill_dummy(self, shape: StepShape, scratch: Sequence[int]) -> DeviceInputs:
        """Write the inputs of a dummy step, whose tokens and rows all live in `scratch` blocks: see `dummy_rows`.

        Returns the tensors that hold them.
        """
        rows = dummy_rows(shape, self.block_size, scratch)
        self.tables.clear()
        self.tables.device_table[: shape.num_rows, : shape.width].copy_(self._to_device(rows.tables), non_blocking=True)
        data, host = self._host(shape)
        host.token_ids[:] = np.arange(shape.num_tokens) % 7
        host.id_sources[:] = self._known[: shape.num_tokens]
        host.positions[:] = rows.positions
        host.slot_mapping[:] = rows.slots
        host.seq_lens[:] = rows.lengths
        host.query_start[:] = rows.starts
        host.last_tokens[:] = np.maximum(rows.starts[1:] - 1, 0)
        self.columns.fill_dummy(host)
        self._send(data)
        return self.inputs(shape)

    def _host(self, shape: StepShape) -> tuple[torch.Tensor, HostInputs]:
        """Memory for the inputs on the host: on a CPU that of the step itself, else new pinned memory.

        A step in flight may not have been copied yet; torch keeps pinned memory until its copies are done.
        """
        size = packed_bytes(shape)
        data = self._packed[:size]
        if self.device.type != "cpu":
            data = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return data, host_views(shape, data.numpy())

    def _to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)

    def _send(self, data: torch.Tensor) -> None:
        if self.device.type != "cpu":
            self._packed[: data.shape[0]].copy_(data, non_blocking=True)


def _fill_rows(host: HostInputs, batch: Batch, block_size: int) -> int:
    """Write tokens and lengths of all rows; returns the number of tokens."""
    decode, rows = batch.rows[: batch.num_decode_rows], len(batch.rows)
    starts = np.array([row.start for row in batch.rows], dtype=np.int64)
    counts = np.array([row.count for row in batch.rows], dtype=np.int64)
    ends = counts.cumsum()
    host.seq_lens[:rows] = starts + counts
    host.query_start[0] = 0
    host.query_start[1 : rows + 1] = ends
    count = len(decode)
    host.token_ids[:count] = [row.token_ids[0] for row in decode]
    host.positions[:count] = starts[:count]
    blocks = np.array([row.block_table[row.start // block_size] for row in decode], dtype=np.int64)
    host.slot_mapping[:count] = blocks * block_size + starts[:count] % block_size
    for row, end in zip(batch.rows[count:], ends[count:].tolist(), strict=True):
        _fill_chunk(host, row, slice(end - row.count, end), block_size)
    return int(ends[-1])


def _fill_chunk(host: HostInputs, row: Row, place: slice, block_size: int) -> None:
    where = np.arange(row.start, row.start + row.count, dtype=np.int64)
    first = row.start // block_size
    blocks = np.array(row.block_table[first : -(-(row.start + row.count) // block_size)], dtype=np.int64)
    host.token_ids[place] = row.token_ids
    host.positions[place] = where
    host.slot_mapping[place] = blocks[where // block_size - first] * block_size + where % block_size
