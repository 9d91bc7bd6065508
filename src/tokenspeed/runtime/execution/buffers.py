"""The static tensors that a step reads and writes, so that a captured step finds its inputs where they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from tokenspeed.runtime.layers.context import ForwardContext
from tokenspeed.runtime.scheduler.batch import Batch


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
class BufferLimits:
    """Largest step that the buffers take."""

    max_tokens: int
    max_rows: int
    max_blocks_per_row: int


class BatchBuffers:
    """Inputs of a step: written by `fill` on the host, read through `context` by the model.

    `input_ids`, `positions` and `slot_mapping` are int64 [max_tokens]; `block_tables` is int32
    [max_rows, max_blocks_per_row]; `seq_lens` int32 [max_rows]; `query_start` int32 [max_rows + 1];
    `logits_rows` int64 [max_rows].
    """

    def __init__(self, limits: BufferLimits, device: torch.device):
        self.limits = limits
        self.device = device

    def allocate(self) -> None:
        """Make the tensors, and their host twins where the device is not the host."""
        tokens, rows = self.limits.max_tokens, self.limits.max_rows
        self.input_ids = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        self.slot_mapping = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        self.block_tables = torch.zeros(rows, self.limits.max_blocks_per_row, dtype=torch.int32, device=self.device)
        self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self.query_start = torch.zeros(rows + 1, dtype=torch.int32, device=self.device)
        self.logits_rows = torch.zeros(rows, dtype=torch.int64, device=self.device)

    def fill(self, batch: Batch, shape: StepShape, block_size: int) -> None:
        """Write the inputs of `batch`, padded to `shape`.

        Padding tokens are id 0 at position 0 and write to the scratch block; padding rows have length 0.
        """
        tokens: list[int] = []
        starts: list[int] = [0]
        positions = np.zeros(shape.num_tokens, dtype=np.int64)
        slots = np.zeros(shape.num_tokens, dtype=np.int64)
        tables = np.zeros((shape.num_rows, shape.width), dtype=np.int32)
        lengths = np.zeros(shape.num_rows, dtype=np.int32)
        for index, row in enumerate(batch.rows):
            first, end = len(tokens), len(tokens) + row.count
            tokens.extend(row.token_ids)
            starts.append(end)
            table = np.asarray(row.block_table[: shape.width], dtype=np.int32)
            tables[index, : len(table)] = table
            where = np.arange(row.start, row.start + row.count, dtype=np.int64)
            positions[first:end] = where
            slots[first:end] = table[where // block_size].astype(np.int64) * block_size + where % block_size
            lengths[index] = row.start + row.count
        last = [end - 1 for end in starts[1:]]
        # In a decode step token i is sequence i, padding included; elsewhere padding rows are empty.
        padding = range(len(batch.rows), shape.num_rows)
        starts.extend(row + 1 if shape.max_query_len == 1 else starts[-1] for row in padding)
        last.extend(0 for _ in padding)
        tokens.extend([0] * (shape.num_tokens - len(tokens)))
        self._put(self.input_ids, tokens)
        self.positions[: shape.num_tokens].copy_(torch.from_numpy(positions))
        self.slot_mapping[: shape.num_tokens].copy_(torch.from_numpy(slots))
        self.block_tables[: shape.num_rows, : shape.width].copy_(torch.from_numpy(tables))
        self.seq_lens[: shape.num_rows].copy_(torch.from_numpy(lengths))
        self._put(self.query_start, starts)
        self._put(self.logits_rows, last)

    def fill_dummy(self, shape: StepShape, block_size: int) -> None:
        """Write the inputs of start-up's dummy step: every token and every row lives in the scratch block."""
        each = -(-shape.num_tokens // shape.num_rows)
        starts = [min(row * each, shape.num_tokens) for row in range(shape.num_rows + 1)]
        lengths = [end - start for start, end in pairwise(starts)]
        positions = [offset for length in lengths for offset in range(length)]
        self._put(self.input_ids, [index % 7 for index in range(shape.num_tokens)])
        self._put(self.positions, positions)
        self._put(self.slot_mapping, [position % block_size for position in positions])
        self.block_tables.zero_()
        self._put(self.seq_lens, lengths)
        self._put(self.query_start, starts)
        self._put(self.logits_rows, [max(end - 1, 0) for end in starts[1:]])

    def context(self, shape: StepShape, kv: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> ForwardContext:
        """Views of the buffers, as long as `shape` says, for the model's forward."""
        return ForwardContext(
            kv=kv,
            slot_mapping=self.slot_mapping[: shape.num_tokens],
            block_tables=self.block_tables[: shape.num_rows, : shape.width],
            seq_lens=self.seq_lens[: shape.num_rows],
            query_start=self.query_start[: shape.num_rows + 1],
            max_query_len=shape.max_query_len,
            logits_rows=self.logits_rows[: shape.num_rows],
        )

    @staticmethod
    def _put(target: torch.Tensor, values: list[int]) -> None:
        target[: len(values)].copy_(torch.tensor(values, dtype=target.dtype))
