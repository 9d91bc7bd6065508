"""What a batch looks like in the static buffers, padded and not."""

from __future__ import annotations

import torch

from tokenspeed.runtime.execution.buffers import BatchBuffers, BufferLimits, StepShape
from tokenspeed.runtime.protocol import SamplingParams
from tokenspeed.runtime.scheduler.batch import Batch, Row
from tokenspeed.runtime.scheduler.request import Request

BLOCK = 4


def row(ids: list[int], start: int, blocks: list[int], samples: bool = True) -> Row:
    request = Request("r", ids, SamplingParams(max_new_tokens=1))
    return Row(request, start, len(ids), samples, ids, None, blocks, ())


def batch(*rows: Row) -> Batch:
    decode = sum(r.count == 1 and r.samples for r in rows)
    return Batch(list(rows), sum(r.count for r in rows), decode, sum(r.samples for r in rows))


def buffers() -> BatchBuffers:
    made = BatchBuffers(BufferLimits(max_tokens=16, max_rows=4, max_blocks_per_row=5), torch.device("cpu"))
    made.allocate()
    return made


def test_a_mixed_batch_without_padding() -> None:
    made = buffers()
    shape = StepShape(num_tokens=4, num_rows=2, max_query_len=3, width=3)
    made.fill(batch(row([9], 5, [2, 7]), row([1, 2, 3], 8, [4, 5, 6])), shape, BLOCK)
    ctx = made.context(shape, [])
    assert made.input_ids[:4].tolist() == [9, 1, 2, 3]
    assert made.positions[:4].tolist() == [5, 8, 9, 10]
    assert ctx.slot_mapping.tolist() == [7 * 4 + 1, 6 * 4, 6 * 4 + 1, 6 * 4 + 2]
    assert ctx.block_tables.tolist() == [[2, 7, 0], [4, 5, 6]]
    assert ctx.seq_lens.tolist() == [6, 11]
    assert ctx.query_start.tolist() == [0, 1, 4]
    assert ctx.logits_rows.tolist() == [0, 3]


def test_padding_of_a_decode_step_writes_to_the_scratch_block() -> None:
    made = buffers()
    shape = StepShape(num_tokens=4, num_rows=4, max_query_len=1, width=5)
    # What an earlier, larger step left behind must not show through.
    made.fill(batch(*(row([5], 6, [3, 3]) for _ in range(4))), shape, BLOCK)
    made.fill(batch(row([9], 5, [2, 7])), shape, BLOCK)
    ctx = made.context(shape, [])
    assert made.input_ids[:4].tolist() == [9, 0, 0, 0]
    assert ctx.slot_mapping.tolist() == [29, 0, 0, 0]
    assert ctx.seq_lens.tolist() == [6, 0, 0, 0]
    assert ctx.query_start.tolist() == [0, 1, 2, 3, 4]
    assert ctx.block_tables[1:].any().item() is False


def test_padding_rows_of_a_prefill_step_are_empty() -> None:
    made = buffers()
    shape = StepShape(num_tokens=8, num_rows=4, max_query_len=8, width=5)
    made.fill(batch(row([1, 2, 3], 0, [4])), shape, BLOCK)
    ctx = made.context(shape, [])
    assert ctx.query_start.tolist() == [0, 3, 3, 3, 3]
    assert ctx.seq_lens.tolist() == [3, 0, 0, 0]
    assert ctx.slot_mapping.tolist() == [16, 17, 18, 0, 0, 0, 0, 0]


def test_the_dummy_step_stays_in_the_scratch_block() -> None:
    made = buffers()
    for shape in (StepShape(10, 1, 10, 5), StepShape(4, 4, 1, 5), StepShape(7, 3, 7, 5)):
        made.fill_dummy(shape, BLOCK)
        ctx = made.context(shape, [])
        assert ctx.slot_mapping.max().item() < BLOCK
        assert not ctx.block_tables.any()
        assert ctx.query_start[-1].item() == shape.num_tokens
        assert ctx.seq_lens.sum().item() == shape.num_tokens
