"""Log-probabilities, penalties and answers that share a prompt, as the scheduler serves them."""

from __future__ import annotations

import pytest

from .fake_engine import FakeEngine


def test_answers_to_one_prompt_compute_it_once() -> None:
    engine = FakeEngine(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=8)
    prompt = [1, 2] * 9
    first = engine.submit(prompt)
    others = [engine.submit(prompt, shares_prompt_with=first.request_id) for _ in range(3)]
    engine.run()
    engine.check_ended()
    assert first.cached_tokens == 0
    assert [request.cached_tokens for request in others] == [16, 16, 16]


def test_nothing_waits_for_a_prompt_that_nothing_could_be_found_of() -> None:
    for options, prompt in (({"prefix_caching": False}, [1] * 9), ({}, [1] * 4)):
        engine = FakeEngine(block_size=4, max_num_batched_tokens=64, **options)  # type: ignore[arg-type]
        first = engine.submit(prompt)
        engine.submit(prompt, shares_prompt_with=first.request_id)
        batch = engine.step()
        assert batch is not None
        assert len(batch.rows) == 2


@pytest.mark.parametrize("end", ["abort", "fail", "unknown"])
def test_answers_start_though_the_first_one_ended_early(end: str) -> None:
    engine = FakeEngine(block_size=4, max_num_batched_tokens=4)
    first = engine.submit([1, 2] * 5)
    leader = "never heard of" if end == "unknown" else first.request_id
    other = engine.submit([1, 2] * 5, shares_prompt_with=leader)
    engine.launch()
    if end == "abort":
        engine.abort(first.request_id)
    if end == "fail":
        engine.fail()
    else:
        engine.commit()
    engine.run()
    engine.check_ended()
    assert engine.finish_reason(other) in ("stop", "length")


def test_answers_that_go_on_elsewhere_compute_their_prompt_once() -> None:
    engine = FakeEngine(block_size=4, max_num_seqs=8, max_num_batched_tokens=8)
    prompt = [1, 2] * 9
    first = engine.submit(prompt, ignore_eos=True)
    other = engine.submit(prompt, shares_prompt_with=first.request_id, ignore_eos=True, logprobs=1)
    while not engine.tokens(other):
        engine.step()
    engine.replace()
    computed = engine.scheduler.loads(paused=False).step_tokens
    while engine.requests[other.request_id].num_scheduled == 0:
        engine.step()
    computed = engine.scheduler.loads(paused=False).step_tokens - computed
    assert computed < 2 * len(prompt)
    engine.run()
    engine.check_ended()


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_an_answer_goes_on_elsewhere_as_if_nothing_had_happened(steps: int) -> None:
    wish = {"max_new_tokens": 7, "min_new_tokens": 4, "presence_penalty": 0.5, "logprobs": 2, "prompt_logprobs": 1}
    engine = FakeEngine(block_size=4)
    cut = engine.submit([1, 2, 1], **wish)  # type: ignore[arg-type]
    for _ in range(steps):
        engine.step()
    engine.replace()
    engine.run()
    engine.check_ended()
    assert len(engine.tokens(cut)) >= 4


def test_what_had_begun_elsewhere_goes_on_while_admission_is_closed() -> None:
    engine = FakeEngine(max_num_seqs=2)
    begun = [engine.submit([1, 2, 1], ignore_eos=True) for _ in range(2)]
    waits = engine.submit([2, 2])
    engine.step()
    engine.replace()
    engine.scheduler.admission_open = False
    assert not engine.scheduler.drained
    assert engine.scheduler.loads(paused=False).waiting == 3
    engine.run()
    assert [engine.finish_reason(request) for request in (*begun, waits)] == ["length", "length", None]
    assert engine.scheduler.drained
    assert engine.scheduler.take_admitted() == [request.request_id for request in begun]
    engine.scheduler.admission_open = True
    engine.run()
    engine.check_ended()


def test_an_answer_that_is_as_long_as_it_may_become_ends_at_once() -> None:
    """Fewer blocks than before, say."""
    engine = FakeEngine(num_blocks=8, block_size=4)
    request = engine.submit([1, 2, 1], ignore_eos=True, max_new_tokens=20)
    for _ in range(7):
        engine.step()
    engine.num_blocks = 2
    engine.replace()
    assert engine.finish_reason(request) == "length"


def test_a_request_with_penalties_sits_out_the_step_in_which_its_last_token_is_unknown() -> None:
    engine = FakeEngine()
    penalised = engine.submit([1, 2], ignore_eos=True, frequency_penalty=0.5)
    plain = engine.submit([2, 1], ignore_eos=True)
    engine.launch()
    batch = engine.launch()
    assert batch is not None
    assert [row.request for row in batch.rows] == [plain]
    engine.commit()
    engine.commit()
    batch = engine.launch()
    assert batch is not None
    assert penalised in [row.request for row in batch.rows]
    engine.commit()
    engine.run(overlap=True)
    engine.check_ended()


def test_prompt_logprobs_are_whole_though_the_prompt_is_cached_and_comes_in_chunks() -> None:
    engine = FakeEngine(block_size=4, max_num_batched_tokens=3)
    prompt = [1, 2, 1, 1, 2, 2, 1, 2, 1, 2]
    engine.submit(prompt)
    engine.run()
    told = engine.submit(prompt, prompt_logprobs=1, logprobs=0)
    engine.run()
    engine.check_ended()
    assert told.cached_tokens == 0
    again = engine.submit(prompt)
    engine.run()
    assert again.cached_tokens == 8


def test_a_prompt_of_one_token_has_no_logprobs_but_says_so() -> None:
    engine = FakeEngine()
    request = engine.submit([3], prompt_logprobs=2)
    engine.run()
    engine.check_ended()
    assert engine.outputs[request.request_id][0].prompt_logprobs == [None]


def test_after_a_preemption_prompt_logprobs_are_not_told_twice() -> None:
    engine = FakeEngine(num_blocks=6, block_size=1)
    engine.submit([1, 2], ignore_eos=True, max_new_tokens=4, prompt_logprobs=1)
    engine.submit([2, 1], ignore_eos=True, max_new_tokens=4, prompt_logprobs=1, logprobs=1, presence_penalty=1.0)
    engine.run()
    engine.check_ended()
    assert engine.scheduler.loads(paused=False).preemptions > 0
