"""Dummy steps: each token has a slot of its own where the scratch memory reaches, and rows are as requests can be."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.runtime.execution.dummy import dummy_rows
from tokenspeed.runtime.execution.inputs import StepShape


@given(
    tokens=st.integers(1, 80),
    rows=st.integers(1, 20),
    width=st.integers(1, 6),
    block_size=st.integers(1, 16),
    blocks=st.integers(1, 90),
)
def test_rows_are_paged_and_apart(tokens: int, rows: int, width: int, block_size: int, blocks: int) -> None:
    scratch = (0, *range(100, 99 + blocks))
    made = dummy_rows(StepShape(tokens, rows, tokens, width), block_size, scratch)
    counts = np.diff(made.starts)
    real = int(made.starts[-1])
    assert made.starts[0] == 0 and (counts >= 0).all() and real <= tokens
    assert (made.lengths >= counts).all() and (made.lengths <= (width - 1) * block_size + 1).all()
    assert set((made.slots // block_size).tolist()) <= set(scratch)
    for row in range(rows):
        for token in range(made.starts[row], made.starts[row + 1]):
            position = int(made.lengths[row] - made.starts[row + 1] + token)
            assert made.positions[token] == position
            assert made.slots[token] == made.tables[row, position // block_size] * block_size + position % block_size
    if blocks >= tokens:
        assert len(set(made.slots[:real].tolist())) == real


def test_what_stands_before_a_row_was_written_by_this_very_step() -> None:
    """16 rows of a decode step fill one block."""
    made = dummy_rows(StepShape(40, 40, 1, 4), 16, (0, 7, 8))
    assert made.starts.tolist() == list(range(41))
    assert made.lengths.tolist() == [*range(1, 17), *range(1, 17), *range(1, 9)]
    assert made.tables[:, 0].tolist() == [0] * 16 + [7] * 16 + [8] * 8
    assert made.slots.tolist() == [*range(16), *range(112, 128), *range(128, 136)]


def test_no_row_is_longer_than_a_request_can_be() -> None:
    made = dummy_rows(StepShape(100, 2, 100, 3), 8, (0,))
    assert made.starts.tolist() == [0, 17, 34]
    assert not made.slots[34:].any() and not made.positions[34:].any()
