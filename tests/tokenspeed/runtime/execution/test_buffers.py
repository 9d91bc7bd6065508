"""What a batch looks like in the static buffers, padded and not."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.runtime.execution.buffers import BatchBuffers, BufferLimits
from tokenspeed.runtime.execution.inputs import ALIGNMENT, StepShape, layout, packed_bytes
from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.runtime.scheduler.batch import UNKNOWN_ID, Batch, Row
from tokenspeed.runtime.scheduler.request import Request

BLOCK = 4
LIMITS = BufferLimits(max_tokens=16, max_rows=4, max_blocks_per_row=5)


def row(
    ids: list[int], start: int, blocks: list[int], samples: bool = True, source: int | None = None, **sampling: float
) -> Row:
    request = Request("r", ids, SamplingParams(max_new_tokens=1, **sampling))  # type: ignore[arg-type]
    return Row(request, start, len(ids), samples, ids, source, blocks, ())


def batch(*rows: Row) -> Batch:
    decode = sum(r.count == 1 and r.samples for r in rows)
    return Batch(list(rows), sum(r.count for r in rows), decode, sum(r.samples for r in rows))


def buffers() -> BatchBuffers:
    made = BatchBuffers(LIMITS, BLOCK, torch.device("cpu"))
    made.allocate()
    return made


def input_ids(made: BatchBuffers, shape: StepShape) -> list[int]:
    ids: list[int] = made.id_pool(shape)[made.inputs(shape).id_sources].tolist()
    return ids


def test_a_mixed_batch_without_padding() -> None:
    made = buffers()
    shape = StepShape(num_tokens=4, num_rows=2, max_query_len=3, width=3)
    made.fill(batch(row([9], 5, [2, 7]), row([1, 2, 3], 8, [4, 5, 6])), shape)
    inputs = made.inputs(shape)
    ctx = made.context(shape, inputs, [])
    assert input_ids(made, shape) == [9, 1, 2, 3]
    assert inputs.positions.tolist() == [5, 8, 9, 10]
    assert ctx.slot_mapping.tolist() == [7 * 4 + 1, 6 * 4, 6 * 4 + 1, 6 * 4 + 2]
    assert ctx.block_tables[0, :2].tolist() == [2, 7]
    assert ctx.block_tables[1].tolist() == [4, 5, 6]
    assert ctx.seq_lens.tolist() == [6, 11]
    assert ctx.query_start.tolist() == [0, 1, 4]
    assert inputs.last_tokens.tolist() == [0, 3]
    assert inputs.sample_rows.tolist() == [0, 1]
    assert inputs.sample_positions.tolist() == [6, 11]


def test_a_chunk_that_does_not_sample_leaves_no_gap_among_those_that_do() -> None:
    made = buffers()
    shape = StepShape(num_tokens=6, num_rows=3, max_query_len=3, width=5)
    rows = (row([9], 5, [2, 7], seed=3), row([1, 2], 0, [4], samples=False), row([5, 6, 7], 0, [3], seed=2**64 - 1))
    made.fill(batch(*rows), shape)
    inputs = made.inputs(shape)
    assert inputs.sample_rows.tolist() == [0, 2, 0]
    assert inputs.last_tokens.tolist() == [0, 5, 0]
    assert inputs.seeds.tolist() == [3, -1, 0]
    assert inputs.temperature.tolist() == [1, 1, 0]


def test_the_same_requests_in_another_order_are_sampled_as_they_ask() -> None:
    made = buffers()
    shape = StepShape(num_tokens=2, num_rows=2, max_query_len=1, width=5)
    one, two = row([9], 5, [2, 7], top_k=3, min_p=0.5), row([8], 2, [4], top_p=0.25)
    made.fill(batch(one, two), shape)
    made.fill(batch(two, one), shape)
    inputs = made.inputs(shape)
    assert (inputs.top_k.tolist(), inputs.top_p.tolist(), inputs.min_p.tolist()) == ([0, 3], [0.25, 1], [0, 0.5])


def test_an_id_that_the_host_does_not_know_is_read_where_the_last_step_left_it() -> None:
    made = buffers()
    shape = StepShape(num_tokens=4, num_rows=4, max_query_len=1, width=5)
    made.sampled[:3] = torch.tensor([70, 71, 72])
    rows = (row([UNKNOWN_ID], 5, [2, 7], source=2), row([9], 2, [4]), row([UNKNOWN_ID], 5, [3, 1], source=0))
    made.fill(batch(*rows), shape)
    assert input_ids(made, shape) == [72, 9, 70, 0]


def test_padding_of_a_decode_step_writes_to_the_scratch_block() -> None:
    made = buffers()
    shape = StepShape(num_tokens=4, num_rows=4, max_query_len=1, width=5)
    # What an earlier, larger step left behind must not show through.
    made.fill(batch(*(row([5], 6, [3, 3], source=1) for _ in range(4))), shape)
    made.fill(batch(row([9], 5, [2, 7])), shape)
    inputs = made.inputs(shape)
    assert input_ids(made, shape) == [9, 0, 0, 0]
    assert inputs.slot_mapping.tolist() == [29, 0, 0, 0]
    assert inputs.positions.tolist() == [5, 0, 0, 0]
    assert inputs.seq_lens.tolist() == [6, 0, 0, 0]
    assert inputs.query_start.tolist() == [0, 1, 2, 3, 4]
    assert inputs.temperature.tolist() == [1, 0, 0, 0]


def test_padding_rows_of_a_prefill_step_are_empty() -> None:
    made = buffers()
    shape = StepShape(num_tokens=8, num_rows=4, max_query_len=8, width=5)
    made.fill(batch(row([1, 2, 3], 0, [4])), shape)
    inputs = made.inputs(shape)
    assert inputs.query_start.tolist() == [0, 3, 3, 3, 3]
    assert inputs.seq_lens.tolist() == [3, 0, 0, 0]
    assert inputs.slot_mapping.tolist() == [16, 17, 18, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("shape", [StepShape(10, 1, 10, 5), StepShape(4, 4, 1, 5), StepShape(7, 3, 7, 5)])
def test_the_dummy_step_stays_in_the_scratch_block(shape: StepShape) -> None:
    made = buffers()
    made.fill(batch(row([9], 5, [2, 7])), StepShape(1, 1, 1, 5))
    made.fill_dummy(shape, (0,))
    inputs = made.inputs(shape)
    ctx = made.context(shape, inputs, [])
    assert ctx.slot_mapping.max().item() < BLOCK
    assert not ctx.block_tables.any()
    assert ctx.query_start[-1].item() == shape.num_tokens
    made.fill(batch(row([9], 5, [2, 7])), StepShape(1, 1, 1, 5))
    assert made.tables.device_table[0, :2].tolist() == [2, 7]


@given(st.lists(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2), st.booleans()), max_size=4), max_size=12))
def test_block_tables_hold_the_blocks_of_the_last_step_whatever_came_before(
    steps: list[list[tuple[int, int, bool]]],
) -> None:
    """Rows come, go, change places, grow by blocks, and start anew with other ones."""
    made = buffers()
    tables: dict[int, list[int]] = {}
    fresh = iter(range(1, 10_000))
    for step in steps:
        rows = []
        for name, grown, restarts in {name: (name, grown, again) for name, grown, again in step}.values():
            if restarts or name not in tables or len(tables[name]) + grown > LIMITS.max_blocks_per_row:
                tables[name] = [next(fresh)]
            tables[name].extend(next(fresh) for _ in range(min(grown, LIMITS.max_blocks_per_row - len(tables[name]))))
            rows.append(row([1], 0, tables[name]))
        if rows:
            made.fill(batch(*rows), StepShape(len(rows), len(rows), 1, 5))
        for index, wanted in enumerate(rows):
            assert made.tables.device_table[index, : len(wanted.block_table)].tolist() == wanted.block_table


@given(st.integers(1, 300), st.integers(1, 300))
def test_the_arrays_of_a_step_are_aligned_and_do_not_overlap(tokens: int, rows: int) -> None:
    sections = layout(tokens, rows)
    assert sections[0].name == "token_ids"
    assert all(section.offset % ALIGNMENT == 0 for section in sections)
    assert all(left.end <= right.offset < left.end + ALIGNMENT for left, right in pairwise(sections))
    assert packed_bytes(StepShape(tokens, rows, tokens, 1)) == sections[-1].end
