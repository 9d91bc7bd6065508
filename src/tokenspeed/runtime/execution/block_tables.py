"""The block tables of a step's rows on the device, of which only what has changed is sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tokenspeed.runtime.scheduler.batch import Row


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
        self._sent: list[tuple[list[int], int] | None] = [None] * self.num_rows

    def clear(self) -> None:
        """Let every entry name the scratch block."""
        self.device_table.zero_()
        self._sent = [None] * self.num_rows

    def update(self, rows: Sequence[Row]) -> None:
        """Let row i hold the blocks of rows[i]."""
        places: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        blocks: list[int] = []
        for index, row in enumerate(rows):
            table = row.block_table
            length = len(table)
            known, sent = self._sent[index] or (None, 0)
            # A block table only grows, and a request that gives its blocks back gets another list.
            first = sent if known is table else 0
            if first == length and known is table:
                continue
            self._sent[index] = (table, length)
            places.append(np.arange(index * self.width + first, index * self.width + length, dtype=np.int64))
            blocks.extend(table[first:])
        if blocks:
            self._send(np.concatenate(places), np.array(blocks, dtype=np.int32))

    def _send(
        self, places: np.ndarray[tuple[int], np.dtype[np.int64]], blocks: np.ndarray[tuple[int], np.dtype[np.int32]]
    ) -> None:
        flat = self.device_table.view(-1)
        where, what = torch.from_numpy(places), torch.from_numpy(blocks)
        if self.device.type != "cpu":
            where = where.pin_memory().to(self.device, non_blocking=True)
            what = what.pin_memory().to(self.device, non_blocking=True)
        flat.index_copy_(0, where, what)
