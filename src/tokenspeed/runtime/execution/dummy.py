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
    positions = np.zeros(shape.num_tokens, dtype=np.int64)
    places = np.zeros(shape.num_tokens, dtype=np.int64)
    lengths = np.zeros(shape.num_rows, dtype=np.int32)
    starts = np.zeros(shape.num_rows + 1, dtype=np.int32)
    tables = np.zeros((shape.num_rows, shape.width), dtype=np.int32)
    place = 0
    for row in range(shape.num_rows):
        start = int(starts[row])
        stop = starts[row + 1] = min(start + each, shape.num_tokens)
        if start == stop:
            continue
        if place % block_size + each > most:
            place += -place % block_size
        before, count = place % block_size, stop - start
        positions[start:stop] = np.arange(before, before + count)
        places[start:stop] = np.arange(place, place + count)
        lengths[row] = before + count
        first, last = place // block_size, (place + count - 1) // block_size
        tables[row, : last - first + 1] = [scratch[block % len(scratch)] for block in range(first, last + 1)]
        place += count
    used = int(starts[-1])
    blocks = np.asarray(scratch, dtype=np.int64)[places // block_size % len(scratch)]
    slots = blocks * block_size + places % block_size
    slots[used:] = 0
    return DummyRows(positions, slots, lengths, starts, tables)
