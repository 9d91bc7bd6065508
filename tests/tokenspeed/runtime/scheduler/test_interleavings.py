"""Any order of calls gives every request the answer that it gets alone, and loses no block."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from .fake_device import VOCAB
from .fake_engine import FakeEngine

EFFORT = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)

limits = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(2, 14),
        "block_size": st.integers(1, 4),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(1, 12),
        "max_model_len": st.integers(2, 40),
        "prefix_caching": st.booleans(),
    }
)
# Two ids only, so that prompts often start alike; often short, so that many requests run at once.
token_ids = st.integers(1, 2)
prompts = st.lists(token_ids, min_size=1, max_size=3) | st.lists(token_ids, min_size=1, max_size=24)
# Long answers make blocks scarce, all other settings make requests end early.
long_answers = st.fixed_dictionaries({"max_new_tokens": st.integers(8, 30), "ignore_eos": st.just(True)})
short_answers = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(1, 20),
        "min_new_tokens": st.integers(0, 6),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=2).map(tuple),
    }
)
wishes = st.fixed_dictionaries(
    {},
    optional={
        "logprobs": st.integers(0, 2),
        "prompt_logprobs": st.integers(0, 2),
        "presence_penalty": st.just(0.5),
    },
)
samplings = st.builds(lambda lengths, wishes: lengths | wishes, long_answers | short_answers, wishes | st.just({}))


class Interleavings(RuleBasedStateMachine):
    """Every call that an engine can make, in any order, with at most one uncommitted step at a `schedule`."""

    engine: FakeEngine
    generation = 0

    @initialize(limits=limits)
    def start(self, limits: dict[str, Any]) -> None:
        self.engine = FakeEngine(**limits)

    @rule(prompt=prompts, sampling=samplings)
    def submit(self, prompt: list[int], sampling: dict[str, Any]) -> None:
        self.engine.submit(prompt, **sampling)

    @rule(prompt=prompts, sampling=samplings, count=st.integers(2, 4))
    def submit_several_answers(self, prompt: list[int], sampling: dict[str, Any], count: int) -> None:
        first = self.engine.submit(prompt, **sampling)
        for _ in range(count - 1):
            self.engine.submit(prompt, shares_prompt_with=first.request_id, **sampling)

    @rule(number=st.integers(0, 30))
    def abort_all_answers(self, number: int) -> None:
        for request in list(self.engine.requests.values()):
            if f"r{number}" in (request.request_id, request.shares_prompt_with):
                self.engine.abort(request.request_id)

    @rule(prompt=prompts, sampling=samplings, data=st.data())
    def submit_follow_up(self, prompt: list[int], sampling: dict[str, Any], data: st.DataObject) -> None:
        """A second turn: an earlier prompt and its answer so far, then something new."""
        earlier = [request.token_ids for request in self.engine.requests.values() if request.token_ids]
        base = data.draw(st.sampled_from(earlier)) if earlier else []
        self.engine.submit(base + prompt, **sampling)

    @rule(number=st.integers(0, 30))
    def abort(self, number: int) -> None:
        self.engine.abort(f"r{number}")

    @rule()
    def abort_running(self) -> None:
        self.engine.abort_running()

    @rule()
    def flush(self) -> None:
        self.engine.flush()

    @rule()
    def reseed(self) -> None:
        self.generation += 1
        self.engine.reseed(self.generation)

    @precondition(lambda self: not self.engine.device.pending)
    @rule()
    def reload_and_keep(self) -> None:
        self.engine.recompute_running()
        self.reseed()

    @rule(is_held=st.booleans())
    def hold_running(self, is_held: bool) -> None:
        self.engine.scheduler.holds_running = is_held

    @rule()
    def replace_ranks(self) -> None:
        self.engine.replace()

    @rule(is_open=st.booleans())
    def hold(self, is_open: bool) -> None:
        self.engine.scheduler.admission_open = is_open

    @precondition(lambda self: len(self.engine.device.pending) < 2)
    @rule()
    def schedule(self) -> None:
        self.engine.launch()

    @precondition(lambda self: self.engine.device.pending)
    @rule()
    def commit(self) -> None:
        self.engine.commit()

    @precondition(lambda self: self.engine.device.pending)
    @rule()
    def fail(self) -> None:
        self.engine.fail()

    @rule(count=st.integers(1, 12), overlap=st.booleans())
    def several_steps(self, count: int, overlap: bool) -> None:
        for _ in range(count):
            if len(self.engine.device.pending) < 2:
                self.engine.launch()
            while len(self.engine.device.pending) > overlap:
                self.engine.commit()

    @invariant()
    def rules_hold(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.scheduler.admission_open = True
        self.engine.scheduler.holds_running = False
        while self.engine.device.pending:
            self.engine.commit()
        self.engine.run(overlap=True)
        self.engine.check_ended()
        ids = list(self.engine.requests)
        assert self.engine.admitted == sorted(self.engine.admitted, key=ids.index), "somebody was overtaken"


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = EFFORT


@EFFORT
@given(limits=limits, work=st.lists(st.tuples(prompts, samplings), max_size=12))
def test_a_step_in_flight_changes_no_answer(
    limits: dict[str, Any], work: list[tuple[list[int], dict[str, Any]]]
) -> None:
    answers = []
    for overlap in (False, True):
        engine = FakeEngine(**limits)
        for prompt, sampling in work:
            engine.submit(prompt, **sampling)
        engine.run(overlap=overlap)
        engine.check_ended()
        answers.append(
            [(engine.tokens(request), engine.finish_reason(request)) for request in engine.requests.values()]
        )
    assert answers[0] == answers[1]
