"""The block tables of a step's rows on the device, of which only what has changed is sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tokenspeed.runtime.scheduler.batch import Row

NewBlocks = tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int32]]]
"""Places in the flat table, and the blocks that belong there."""


class BlockTables:
    """`device_table` is int32 [rows, width]; row i holds the blocks of the i-th row of the step.

    Behind the blocks of a row, and in rows that the step has not, stands what earlier steps left: valid blocks, which
    nobody reads further than the lengths say.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device):
        self.num_rows = num_rows
        self.width = width
        self.device = device

    def allocate(self) -> None:
        """Make the table, all scratch."""
        self.device_table = torch.zeros(self.num_rows, self.width, dtype=torch.int32, device=self.device)
        self._sent: list[tuple[list[int] | None, int]] = [(None, 0)] * self.num_rows

    def clear(self) -> None:
        """Let every entry name the scratch block."""
        self.device_table.zero_()
        self._sent = [(None, 0)] * self.num_rows

    def changes(self, rows: Sequence[Row]) -> NewBlocks:
        """What row i has to get in order to hold the blocks of rows[i]; the caller sees to it."""
        places: list[int] = []
        blocks: list[int] = []
        sent = self._sent
        for index, row in enumerate(rows):
            table = row.block_table
            length = len(table)
            known, first = sent[index]
            # A block table only grows, and a request that gives its blocks back gets another list.
            if known is not table:
                first = 0
            elif first == length:
                continue
            sent[index] = (table, length)
            places.extend(range(index * self.width + first, index * self.width + length))
            blocks.extend(table[first:])
        return np.array(places, dtype=np.int64), np.array(blocks, dtype=np.int32)

    def write(self, places: torch.Tensor, blocks: torch.Tensor) -> None:
        """Put `blocks`, int32, at `places`, int64, both on the device."""
        self.device_table.view(-1).index_copy_(0, places, blocks)
