"""How requests end: stop ids, lengths, aborts, refusals, also one step late."""

from __future__ import annotations

import pytest

from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.runtime.scheduler.request import Request, RequestState

from .fake_device import EOS, reference
from .fake_engine import FakeEngine


def give(engine: FakeEngine, *token_ids: int) -> list[tuple[list[int], str | None, int | None]]:
    """Step with these ids instead of the model's, one for each row."""
    batch = engine.scheduler.schedule()
    assert batch is not None
    outputs = engine.scheduler.commit(batch, list(token_ids))
    return [(output.token_ids, output.finish_reason, output.matched_stop) for output in outputs]


def test_eos_ends_a_request_and_is_not_part_of_the_answer() -> None:
    engine = FakeEngine()
    engine.submit([1, 2])
    assert give(engine, 5) == [([5], None, None)]
    assert give(engine, EOS) == [([], "stop", EOS)]
    assert not engine.scheduler.has_work


def test_stop_token_ids_end_a_request_beside_eos() -> None:
    engine = FakeEngine()
    engine.submit([1], stop_token_ids=(7,))
    engine.submit([1], stop_token_ids=(7,))
    assert give(engine, 7, EOS) == [([], "stop", 7), ([], "stop", EOS)]


def test_ignore_eos_leaves_the_other_stop_ids() -> None:
    engine = FakeEngine()
    engine.submit([1], ignore_eos=True, stop_token_ids=(7,))
    assert give(engine, EOS) == [([EOS], None, None)]
    assert give(engine, 7) == [([], "stop", 7)]


def test_an_eos_that_is_asked_for_as_stop_id_stops_in_spite_of_ignore_eos() -> None:
    engine = FakeEngine()
    engine.submit([1], ignore_eos=True, stop_token_ids=(EOS,))
    assert give(engine, EOS) == [([], "stop", EOS)]


def test_stop_ids_are_forbidden_for_the_first_min_new_tokens() -> None:
    engine = FakeEngine()
    engine.submit([1, 1], min_new_tokens=2, stop_token_ids=(7, EOS))
    forbidden = []
    for _ in range(3):
        batch = engine.scheduler.schedule()
        assert batch is not None
        forbidden.append(batch.rows[0].forbidden_ids)
        engine.scheduler.commit(batch, [5])
    assert forbidden == [(EOS, 7), (EOS, 7), ()]


def test_max_new_tokens_ends_with_length_and_a_stop_id_there_with_stop() -> None:
    engine = FakeEngine()
    engine.submit([1], max_new_tokens=2)
    engine.submit([1], max_new_tokens=2)
    give(engine, 3, 3)
    assert give(engine, 4, EOS) == [([4], "length", None), ([], "stop", EOS)]


def test_max_model_len_counts_prompt_and_answer() -> None:
    engine = FakeEngine(max_model_len=5)
    request = engine.submit([1, 2, 3], ignore_eos=True, max_new_tokens=100)
    engine.run(overlap=True)
    assert (len(engine.tokens(request)), engine.finish_reason(request)) == (2, "length")


def test_a_prompt_of_max_model_len_gets_one_token() -> None:
    engine = FakeEngine(max_model_len=3)
    request = engine.submit([1, 2, 3], ignore_eos=True)
    engine.run(overlap=True)
    assert (len(engine.tokens(request)), engine.finish_reason(request)) == (1, "length")


def test_a_request_that_fills_the_whole_kv_cache_ends_with_length() -> None:
    engine = FakeEngine(num_blocks=3, block_size=4, max_model_len=1000, max_num_batched_tokens=3)
    request = engine.submit([1] * 5, ignore_eos=True, max_new_tokens=500)
    engine.run(overlap=True)
    assert (len(request.token_ids), engine.finish_reason(request)) == (12, "length")
    engine.check_ended()


def test_a_prompt_that_can_never_fit_is_refused_in_one_sentence() -> None:
    engine = FakeEngine(num_blocks=3, block_size=4, max_model_len=1000)
    request = engine.submit([1] * 13)
    output = engine.outputs[request.request_id][-1]
    assert output.finish_reason == "error"
    assert output.error == "the prompt has 13 tokens, more than the 12 that fit; shorten it"
    assert not engine.scheduler.has_work


def test_an_empty_prompt_is_refused() -> None:
    engine = FakeEngine()
    request = engine.submit([])
    assert "at least one token" in engine.outputs[request.request_id][-1].error


def test_a_request_for_no_tokens_ends_at_once() -> None:
    engine = FakeEngine()
    request = engine.submit([1], max_new_tokens=0)
    assert engine.finish_reason(request) == "length"
    assert not engine.scheduler.has_work


def test_a_live_id_is_taken_and_a_finished_one_is_free() -> None:
    engine = FakeEngine()
    engine.submit([1], request_id="a")
    again = Request("a", [1], SamplingParams(max_new_tokens=1))
    with pytest.raises(ValueError, match="already being served"):
        engine.scheduler.submit(again)
    engine.abort("a")
    assert engine.scheduler.submit(again) == []


def test_the_prompt_of_the_caller_stays_as_it_was() -> None:
    engine = FakeEngine()
    prompt = [1, 2]
    engine.submit(prompt, ignore_eos=True)
    engine.run()
    assert prompt == [1, 2]


def test_a_stop_found_one_step_late_ignores_the_row_in_flight_and_keeps_its_blocks_until_then() -> None:
    engine = FakeEngine(block_size=1, prefix_caching=False)
    engine.submit([1, 2])
    scheduler = engine.scheduler
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None
    assert scheduler.commit(first, [EOS])[0].finish_reason == "stop"
    assert scheduler.loads(paused=False).used_blocks == 3
    assert scheduler.commit(second, [5]) == []
    assert scheduler.loads(paused=False).used_blocks == 0


def test_no_row_is_scheduled_behind_the_token_that_reaches_the_length() -> None:
    engine = FakeEngine()
    engine.submit([1, 2], max_new_tokens=1)
    assert engine.launch() is not None
    assert engine.launch() is None
    engine.commit()
    assert engine.scheduler.drained


@pytest.mark.parametrize("steps_in_flight", [0, 1, 2])
def test_an_abort_ends_a_request_with_what_was_sent(steps_in_flight: int) -> None:
    engine = FakeEngine(block_size=2)
    request = engine.submit([1, 2], ignore_eos=True, max_new_tokens=30)
    other = engine.submit([2, 2], ignore_eos=True, max_new_tokens=5)
    engine.step()
    for _ in range(steps_in_flight):
        engine.launch()
    engine.abort("r0")
    assert engine.finish_reason(request) == "abort"
    assert len(engine.tokens(request)) == 1
    while engine.device.pending:
        engine.commit()
    engine.run(overlap=True)
    engine.check_ended()
    assert engine.tokens(other) == reference(other.prompt, other.sampling, 64)[0]


def test_aborting_a_waiting_or_unknown_request() -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.submit([1], ignore_eos=True)
    waiting = engine.submit([1, 2, 3])
    engine.step()
    engine.abort("r1")
    assert engine.finish_reason(waiting) == "abort"
    assert engine.scheduler.loads(paused=False).waiting_tokens == 0
    assert engine.scheduler.abort("r1") == []
    assert engine.scheduler.abort("nobody") == []
    engine.run()
    engine.check_ended()


def test_abort_running_ends_running_and_preempted_requests_and_leaves_the_waiting_ones() -> None:
    engine = FakeEngine(num_blocks=6, block_size=1, max_num_seqs=2, prefix_caching=False)
    requests = [engine.submit([1, 2], ignore_eos=True, max_new_tokens=4) for _ in range(3)]
    while requests[1].state is not RequestState.PREEMPTED:
        engine.step()
    engine.scheduler.admission_open = False
    engine.abort_running()
    assert [engine.finish_reason(request) for request in requests] == ["abort", "abort", None]
    assert engine.scheduler.drained and not engine.scheduler.has_work
    engine.scheduler.admission_open = True
    engine.run()
    engine.check_ended()


@pytest.mark.parametrize("steps_in_flight", [0, 1])
def test_a_step_that_breaks_ends_its_requests_and_no_others(steps_in_flight: int) -> None:
    engine = FakeEngine(max_num_seqs=2)
    broken = [engine.submit([1, 2, 3, 4, 5]), engine.submit([6, 7])]
    waiting = engine.submit([8, 9])
    for _ in range(1 + steps_in_flight):
        engine.launch()
    engine.fail()
    assert [engine.finish_reason(request) for request in broken] == ["error", "error"]
    assert [engine.outputs[request.request_id][-1].error for request in broken] == ["the step broke"] * 2
    engine.run()
    assert engine.finish_reason(waiting) in ("stop", "length")
    engine.check_ended()


def test_nothing_that_a_broken_step_wrote_is_found_again() -> None:
    engine = FakeEngine()
    prompt = list(range(1, 13))
    engine.submit(prompt)
    engine.launch()
    engine.fail()
    again = engine.submit(prompt)
    engine.run()
    assert again.cached_tokens == 0
