"""Blocks between requests: preemption, the prefix cache, flush and reseed, holding admission."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tokenspeed.runtime.scheduler.request import RequestState

from .fake_engine import FakeEngine


def tight_engine() -> FakeEngine:
    """Room for two prompts of two tokens, and for two more tokens."""
    return FakeEngine(num_blocks=6, block_size=1, prefix_caching=False)


def test_the_youngest_request_is_preempted_and_sends_nothing_twice() -> None:
    engine = tight_engine()
    old = engine.submit([1, 2], ignore_eos=True, max_new_tokens=4)
    young = engine.submit([2, 1], ignore_eos=True, max_new_tokens=4)
    while young.state is not RequestState.PREEMPTED:
        engine.step()
    sent = len(engine.tokens(young))
    assert sent > 0
    assert old.state is RequestState.RUNNING
    while young.state is RequestState.PREEMPTED:
        batch = engine.step()
    assert batch is not None
    assert [(row.start, row.token_ids) for row in batch.rows] == [(0, young.token_ids[: 2 + sent])]
    engine.run()
    engine.check_ended()
    assert engine.scheduler.loads(paused=False).preemptions == 1


def test_a_request_in_flight_is_held_back_one_step_before_it_is_preempted() -> None:
    engine = tight_engine()
    old = engine.submit([1, 2], ignore_eos=True, max_new_tokens=4)
    young = engine.submit([2, 1], ignore_eos=True, max_new_tokens=4)
    engine.launch()
    engine.launch()
    engine.commit()
    assert engine.launch() is None, "both need a block; the younger one is in flight"
    assert (old.state, young.state) == (RequestState.RUNNING, RequestState.RUNNING)
    engine.commit()
    batch = engine.launch()
    assert batch is not None
    assert [row.request for row in batch.rows] == [old]
    assert young.state is RequestState.PREEMPTED
    engine.commit()
    engine.run(overlap=True)
    engine.check_ended()


@pytest.mark.parametrize(("num_blocks", "young_prompt"), [(2, [2]), (5, [2] * 30)], ids=["decode", "prefill"])
def test_an_older_request_waits_one_step_for_a_block_however_long_the_younger_could_go_on(
    num_blocks: int, young_prompt: list[int]
) -> None:
    engine = FakeEngine(num_blocks=num_blocks, block_size=8, max_num_batched_tokens=8, prefix_caching=False)
    old = engine.submit([1] * 7, ignore_eos=True, max_new_tokens=4)
    young = engine.submit(young_prompt, ignore_eos=True, max_new_tokens=7)
    engine.launch()
    engine.launch()
    engine.commit()
    assert engine.launch() is None, "the younger one has room, but sits this step out"
    engine.commit()
    batch = engine.launch()
    assert batch is not None
    assert [row.request for row in batch.rows] == [old]
    assert young.state is RequestState.PREEMPTED
    engine.commit()
    engine.run(overlap=True)
    engine.check_ended()


def test_preempted_requests_return_in_order_of_arrival_before_any_waiting_one() -> None:
    engine = FakeEngine(num_blocks=12, block_size=1, max_num_seqs=3, prefix_caching=False)
    requests = [engine.submit([1, 2], ignore_eos=True, max_new_tokens=10) for _ in range(4)]
    order = []
    while engine.scheduler.has_work:
        before = [request.state for request in requests]
        engine.step()
        order += [
            request.request_id
            for request, state in zip(requests, before, strict=True)
            if state is not RequestState.RUNNING and request.state is RequestState.RUNNING
        ]
    engine.check_ended()
    assert engine.scheduler.loads(paused=False).preemptions >= 2
    assert order[:5] == ["r0", "r1", "r2", "r1", "r2"]


def test_held_requests_keep_their_order_while_preempted_ones_return() -> None:
    engine = tight_engine()
    old = engine.submit([1, 2], ignore_eos=True, max_new_tokens=4)
    young = engine.submit([2, 1], ignore_eos=True, max_new_tokens=4)
    while young.state is not RequestState.PREEMPTED:
        engine.step()
    held = [engine.submit([1], ignore_eos=True, max_new_tokens=1) for _ in range(3)]
    engine.scheduler.admission_open = False
    engine.run()
    assert [engine.finish_reason(request) for request in (old, young)] == ["length", "length"]
    assert all(engine.finish_reason(request) is None for request in held)
    assert engine.scheduler.drained and not engine.scheduler.has_work
    engine.scheduler.admission_open = True
    batch = engine.step()
    assert batch is not None
    assert [row.request for row in batch.rows] == held


def test_a_cached_prefix_is_not_computed_again_and_reported_with_every_output() -> None:
    engine = FakeEngine(block_size=4)
    engine.submit([1] * 10, ignore_eos=True, max_new_tokens=1)
    engine.run()
    request = engine.submit([1] * 8, ignore_eos=True, max_new_tokens=3)
    batch = engine.launch()
    assert batch is not None
    assert (batch.rows[0].start, batch.rows[0].count) == (4, 4), "the last token is always computed"
    engine.commit()
    engine.run()
    assert [output.cached_tokens for output in engine.outputs[request.request_id]] == [4, 4, 4]


def test_answers_are_cached_too() -> None:
    engine = FakeEngine(block_size=2)
    first = engine.submit([1] * 3, ignore_eos=True, max_new_tokens=6)
    engine.run()
    second = engine.submit([*first.token_ids, 1], ignore_eos=True)
    engine.run()
    assert second.cached_tokens == 8


def test_a_block_is_found_only_after_the_step_that_writes_it_is_committed() -> None:
    engine = FakeEngine(block_size=2)
    engine.submit([1] * 5, ignore_eos=True)
    engine.launch()
    early = engine.submit([1] * 5, ignore_eos=True)
    engine.launch()
    assert early.cached_tokens == 0
    engine.commit()
    late = engine.submit([1] * 5, ignore_eos=True)
    engine.launch()
    assert late.cached_tokens == 4


def test_a_reseed_hides_what_running_requests_computed_before_and_after_it() -> None:
    engine = FakeEngine(block_size=2)
    running = engine.submit([1] * 5, ignore_eos=True, max_new_tokens=20)
    engine.step()
    engine.reseed(1)
    while len(running.token_ids) < 12:
        engine.step()
    after = engine.submit(running.token_ids[:11], ignore_eos=True)
    engine.step()
    assert after.cached_tokens == 0
    again = engine.submit(running.token_ids[:11], ignore_eos=True)
    engine.step()
    assert again.cached_tokens == 10, "the blocks of the first request that began after it are found"
    engine.run()
    engine.check_ended()


def test_a_request_that_is_preempted_after_a_reseed_belongs_to_the_new_seed() -> None:
    engine = FakeEngine(num_blocks=6, block_size=1)
    old = engine.submit([1, 2], ignore_eos=True, max_new_tokens=4)
    young = engine.submit([2, 1], ignore_eos=True, max_new_tokens=4)
    engine.step()
    engine.reseed(1)
    while young.state is not RequestState.PREEMPTED:
        engine.step()
    engine.run()
    assert engine.finish_reason(old) == "length"
    follow_up = engine.submit(young.token_ids[:5], ignore_eos=True, max_new_tokens=1)
    engine.run()
    assert follow_up.cached_tokens == 4


def test_a_flush_gives_cached_blocks_back_and_leaves_running_requests_alone() -> None:
    engine = FakeEngine(block_size=2)
    engine.submit([1] * 6, ignore_eos=True, max_new_tokens=1)
    engine.run()
    running = engine.submit([2] * 6, ignore_eos=True, max_new_tokens=9)
    engine.step()
    assert engine.scheduler.loads(paused=False).cached_blocks == 3
    engine.flush()
    loads = engine.scheduler.loads(paused=False)
    assert (loads.cached_blocks, loads.used_blocks) == (0, 3)
    engine.run()
    assert engine.finish_reason(running) == "length"
    engine.check_ended()


WORKLOAD = """
import json
from tokenspeed.runtime.cache.manager import KVCacheManager
from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.runtime.scheduler.limits import SchedulerLimits
from tokenspeed.runtime.scheduler.request import Request
from tokenspeed.runtime.scheduler.scheduler import Scheduler

limits = SchedulerLimits(
    max_num_seqs=4, max_num_batched_tokens=9, max_model_len=40, block_size=2, eos_token_ids=(0,)
)
scheduler = Scheduler(limits, KVCacheManager(20, 2))
for i in range(12):
    sampling = SamplingParams(max_new_tokens=6 + i, stop_token_ids=(7, 5))
    scheduler.submit(Request(f"request-{i}", [1 + i % 2] * (3 + i), sampling))
transcript, step, pending = [], 0, []
while scheduler.has_work or pending:
    batch = scheduler.schedule()
    if batch is not None:
        pending.append(batch)
        transcript.append([(r.request.request_id, r.start, r.count, r.block_table[:]) for r in batch.rows])
    if len(pending) > 1 or batch is None:
        batch = pending.pop(0)
        step += 1
        scheduler.commit(batch, [(step * 3 + i) % 11 for i in range(batch.num_samples)])
print(json.dumps(transcript))
"""


def test_every_process_schedules_alike() -> None:
    transcripts = [
        subprocess.run(
            [sys.executable, "-c", WORKLOAD],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert transcripts[0] == transcripts[1]
    assert len(json.loads(transcripts[0])) > 10
