"""What goes into a step: budget, order, chunks, seats, and the step in flight."""

from __future__ import annotations

import pytest

from tokenspeed.runtime.cache.manager import KVCacheManager
from tokenspeed.runtime.scheduler.batch import UNKNOWN_ID, Batch
from tokenspeed.runtime.scheduler.limits import SchedulerLimits
from tokenspeed.runtime.scheduler.scheduler import Scheduler

from .fake_engine import FakeEngine


def shape(batch: Batch | None) -> list[tuple[str, int, int, bool]]:
    assert batch is not None
    return [(row.request.request_id, row.start, row.count, row.samples) for row in batch.rows]


def test_a_long_prompt_is_prefilled_in_chunks_and_sampled_after_the_last() -> None:
    engine = FakeEngine(max_num_batched_tokens=4)
    engine.submit([1] * 10, ignore_eos=True)
    assert shape(engine.step()) == [("r0", 0, 4, False)]
    assert shape(engine.step()) == [("r0", 4, 4, False)]
    assert shape(engine.step()) == [("r0", 8, 2, True)]
    assert shape(engine.step()) == [("r0", 10, 1, True)]


def test_decode_comes_first_and_prefill_takes_what_is_left_of_the_budget() -> None:
    engine = FakeEngine(max_num_batched_tokens=6)
    engine.submit([1, 2], ignore_eos=True)
    engine.submit([2] * 3, ignore_eos=True)
    engine.step()
    engine.submit([3] * 9, ignore_eos=True)
    batch = engine.step()
    assert shape(batch) == [("r0", 2, 1, True), ("r1", 3, 1, True), ("r2", 0, 4, False)]
    assert batch is not None
    assert (batch.num_tokens, batch.num_decode_rows, batch.num_samples) == (6, 2, 2)
    assert not batch.is_decode
    engine.step()
    batch = engine.step()
    assert shape(batch)[2:] == [("r2", 8, 1, True)]
    assert batch is not None and batch.is_decode, "a last chunk of one token is a decode row"


def test_no_more_requests_run_than_there_are_seats() -> None:
    engine = FakeEngine(max_num_seqs=2)
    for _ in range(3):
        engine.submit([1], ignore_eos=True, max_new_tokens=2)
    assert [row[0] for row in shape(engine.step())] == ["r0", "r1"]
    assert engine.scheduler.loads(paused=False).waiting == 1
    engine.step()
    assert [row[0] for row in shape(engine.step())] == ["r2"]


def test_a_step_may_be_scheduled_while_one_is_in_flight() -> None:
    engine = FakeEngine()
    request = engine.submit([1, 2, 3], ignore_eos=True, max_new_tokens=4)
    other = engine.submit([2, 2], ignore_eos=True, max_new_tokens=4)
    engine.launch()
    batch = engine.launch()
    assert batch is not None
    assert [(row.token_ids, row.source_row) for row in batch.rows] == [([UNKNOWN_ID], 0), ([UNKNOWN_ID], 1)]
    with pytest.raises(RuntimeError, match="oldest step"):
        engine.scheduler.schedule()
    engine.commit()
    engine.commit()
    batch = engine.launch()
    assert batch is not None
    assert [row.token_ids for row in batch.rows] == [request.token_ids[-1:], other.token_ids[-1:]]


def test_source_rows_name_the_row_in_the_step_in_flight() -> None:
    engine = FakeEngine(max_num_batched_tokens=8)
    first = engine.submit([1, 1], ignore_eos=True, max_new_tokens=1)
    engine.submit([2] * 6, ignore_eos=True, max_new_tokens=9)
    engine.launch()
    batch = engine.launch()
    assert batch is not None
    assert [(row.request.request_id, row.source_row) for row in batch.rows] == [("r1", 1)]
    assert first.in_flight == 1


def test_steps_are_committed_once_and_in_order() -> None:
    engine = FakeEngine()
    engine.submit([1], ignore_eos=True)
    first = engine.scheduler.schedule()
    second = engine.scheduler.schedule()
    assert first is not None and second is not None
    with pytest.raises(RuntimeError, match="in the order"):
        engine.scheduler.commit(second, [1])
    with pytest.raises(ValueError, match="samples 1 ids, not 2"):
        engine.scheduler.commit(first, [1, 2])
    engine.scheduler.commit(first, [1])
    with pytest.raises(RuntimeError, match="once each"):
        engine.scheduler.commit(first, [1])


def test_an_idle_scheduler_has_no_work() -> None:
    engine = FakeEngine()
    assert engine.scheduler.schedule() is None
    assert engine.scheduler.drained and not engine.scheduler.has_work
    engine.submit([1, 2])
    assert engine.scheduler.drained and engine.scheduler.has_work
    engine.launch()
    assert not engine.scheduler.drained
    engine.run()
    assert engine.scheduler.drained and not engine.scheduler.has_work


def test_an_aborted_request_in_flight_is_not_drained_yet() -> None:
    engine = FakeEngine()
    engine.submit([1, 2])
    engine.launch()
    engine.abort("r0")
    assert not engine.scheduler.drained and not engine.scheduler.has_work
    engine.commit()
    assert engine.scheduler.drained


def test_block_sizes_must_agree() -> None:
    limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1, block_size=16, eos_token_ids=())
    with pytest.raises(ValueError, match="16 here and 8"):
        Scheduler(limits, KVCacheManager(4, 8))


def test_loads_tell_what_is_held() -> None:
    engine = FakeEngine(num_blocks=10, block_size=2, max_num_seqs=1)
    engine.submit([1, 2, 3, 4, 5], ignore_eos=True)
    engine.submit([1, 2, 3], ignore_eos=True)
    engine.step()
    loads = engine.scheduler.loads(paused=True)
    assert (loads.running, loads.waiting, loads.waiting_tokens, loads.paused) == (1, 1, 3, True)
    assert (loads.used_blocks, loads.cached_blocks, loads.total_blocks) == (3, 0, 10)
    engine.abort("r0")
    assert engine.scheduler.loads(paused=False).cached_blocks == 2
    engine.step()
    loads = engine.scheduler.loads(paused=False)
    assert (loads.prefix_queried_tokens, loads.prefix_hit_tokens, loads.preemptions) == (8, 2, 0)
