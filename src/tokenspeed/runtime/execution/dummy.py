"""Where the tokens of a dummy step live: in scratch blocks, each in a slot of its own as far as these reach.

What a row computes then depends on that row and on what stands before it in its block, and on nothing else, so that
two runs of the step can be compared row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenspeed.runtime.execution.inputs import StepShape

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class DummyRows:
    """Inputs of a dummy step. Tokens behind the last row are padding: position 0 in slot 0."""

    positions: Array
    """int64 [num_tokens]."""
    slots: Array
    """int64 [num_tokens]."""
    lengths: Array
    """int32 [num_rows]: tokens of each row, with those of other rows that stand before it in its first block."""
    starts: Array
    """int32 [num_rows + 1]: where the tokens of each row begin."""
    tables: Array
    """int32 [num_rows, width]."""


def dummy_rows(shape: StepShape, block_size: int, scratch: Sequence[int]) -> DummyRows:
    """Spread the tokens of `shape` evenly over its rows, and lay row after row into the `scratch` blocks.

    A row that would be longer than a request can be is cut. When the blocks are full the first ones are used again.
    """
    most = max((shape.width - 1) * block_size + 1, 1)
    each = min(-(-shape.num_tokens // shape.num_rows), most)
    starts = np.minimum(np.arange(shape.num_rows + 1) * each, shape.num_tokens)
    counts = np.diff(starts)
    # Rows follow each other as long as none gets too long by what stands before it in its first block.
    step = each if block_size - 1 + each <= most else -(-each // block_size) * block_size
    first_place = np.arange(shape.num_rows) * step
    before = first_place % block_size
    lengths = np.where(counts > 0, before + counts, 0)

    used = int(starts[-1])
    row = np.repeat(np.arange(shape.num_rows), counts)
    index = np.arange(used) - starts[row]
    positions = np.zeros(shape.num_tokens, dtype=np.int64)
    positions[:used] = before[row] + index
    blocks = np.asarray(scratch, dtype=np.int64)
    places = first_place[row] + index
    slots = np.zeros(shape.num_tokens, dtype=np.int64)
    slots[:used] = blocks[places // block_size % len(blocks)] * block_size + places % block_size

    held = -(-lengths // block_size)
    column = np.arange(held.max())
    named = blocks[(first_place[:, None] // block_size + column) % len(blocks)]
    tables = np.zeros((shape.num_rows, shape.width), dtype=np.int32)
    tables[:, : len(column)] = np.where(column < held[:, None], named, 0)
    return DummyRows(positions, slots, lengths.astype(np.int32), starts.astype(np.int32), tables)
