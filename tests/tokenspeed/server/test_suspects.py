"""The request that costs ranks is found, ends, and ends alone, whatever comes when."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.server.journal import Entry
from tokenspeed.server.suspects import MOST_LOSSES, PROOF, Suspects

PROMPT_KILLER = 4
"""Losses that a request costs which strikes before it could be cleared."""


def entry(name: str) -> Entry:
    return Entry(name, name, [1, 2, 3], SamplingParams(max_new_tokens=8, seed=7))


@dataclass
class Engine:
    """Requests, and ranks that are lost when a deadly one has got `deadly` tokens of them."""

    deadly: dict[str, int] = field(default_factory=dict)
    open: list[Entry] = field(default_factory=list)
    ran: list[Entry] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    losses: dict[str, int] = field(default_factory=dict)
    got: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.suspects = Suspects(self.submit, self.give)

    def submit(self, one: Entry) -> None:
        one.had = len(one.tokens)
        self.ran.append(one)

    def give(self) -> None:
        for one in self.open:
            if one not in self.ran:
                self.submit(one)

    def arrive(self, name: str) -> Entry:
        arrived = entry(name)
        self.open.append(arrived)
        if not self.suspects.trying:
            self.submit(arrived)
        return arrived

    def end(self, ending: Entry) -> None:
        self.open.remove(ending)
        if ending in self.ran:
            self.ran.remove(ending)
        self.suspects.end(ending)

    def lose(self) -> None:
        ran = list(self.ran)
        self.ran.clear()
        self.got.clear()
        for guilty in self.suspects.lose(ran, self.open):
            self.open.remove(guilty)
            self.ended.append(guilty.request_id)
        self.suspects.begin(self.open)

    def step(self, running: list[Entry]) -> None:
        """A step computes some of what the ranks have; a deadly one costs them."""
        for one in running:
            if one not in self.ran:
                continue
            if self.got.get(one.request_id, 0) == self.deadly.get(one.request_id):
                self.losses[one.request_id] = self.losses.get(one.request_id, 0) + 1
                self.lose()
                return
            self.got[one.request_id] = self.got.get(one.request_id, 0) + 1
            one.tokens.append(0)
            self.suspects.progress(one)

    def all(self) -> None:
        self.step(list(self.ran))


def with_suspects(*names: str) -> tuple[Engine, list[Entry]]:
    """These requests ran together at two losses."""
    engine = Engine()
    arrived = [engine.arrive(name) for name in names]
    engine.lose()
    engine.lose()
    return engine, arrived


def test_a_request_that_is_alone_costs_two_losses() -> None:
    engine = Engine({"d": 0})
    engine.arrive("d")
    engine.all()
    assert engine.ended == []
    engine.all()
    assert engine.ended == ["d"]


def test_a_request_that_got_on_before_each_loss_is_not_taken_for_the_cause() -> None:
    engine = Engine()
    engine.arrive("a")
    for _ in range(MOST_LOSSES - 1):
        for _ in range(PROOF):
            engine.all()
        engine.lose()
    assert engine.ended == []


def test_of_many_that_run_together_the_cause_ends_alone() -> None:
    engine = Engine({"d": 0})
    for name in "abcdef":
        engine.arrive(name)
    while engine.open and not engine.ended:
        engine.all()
    assert engine.ended == ["d"]
    assert engine.losses["d"] <= PROMPT_KILLER
    assert [kept.request_id for kept in engine.ran] == list("abcef")
    assert not any(kept.losses for kept in engine.open), "what happened is explained"


def test_nothing_runs_beside_the_first_suspect_and_what_comes_waits() -> None:
    engine, _ = with_suspects("a", "b")
    engine.arrive("c")
    assert [kept.request_id for kept in engine.ran] == ["b"]
    for _ in range(PROOF):
        assert engine.suspects.trying
        engine.all()
    assert [kept.request_id for kept in engine.ran] == ["b", "a"]
    for _ in range(PROOF):
        assert engine.suspects.trying
        engine.all()
    assert [kept.request_id for kept in engine.ran] == ["b", "a", "c"]
    assert not engine.suspects.trying


def test_a_suspect_that_ends_makes_room_for_the_next() -> None:
    engine, (first, second) = with_suspects("a", "b")
    engine.end(second)
    assert engine.ran == [first]
    engine.end(first)
    assert not engine.suspects.trying


def test_a_suspect_that_ends_before_it_was_given_is_left_out() -> None:
    engine, (first, second) = with_suspects("a", "b")
    engine.end(first)
    for _ in range(PROOF):
        engine.all()
    assert engine.ran == [second]
    assert not engine.suspects.trying


def test_one_who_strikes_late_ends_with_the_last_of_its_losses() -> None:
    engine = Engine({"d": 100 * PROOF})
    engine.arrive("d")
    engine.arrive("a")
    for _ in range(10**5):
        engine.all()
        if engine.ended:
            break
    assert engine.losses["d"] == MOST_LOSSES
    assert "d" in engine.ended


@pytest.mark.parametrize("ran", [[], ["a", "b"]])
def test_a_loss_that_is_nobody_s_fault_ends_nobody(ran: list[str]) -> None:
    engine = Engine()
    for name in ran:
        engine.arrive(name)
    engine.lose()
    assert engine.ended == []
    assert [kept.request_id for kept in engine.ran] == ran


deadly_after = st.integers(0, PROOF - 1)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), after=deadly_after)
def test_a_prompt_killer_costs_four_losses_and_no_other_request(data: st.DataObject, after: int) -> None:
    engine = Engine({"d": after})
    everything(engine, data)
    assert engine.losses.get("d", 0) <= PROMPT_KILLER
    assert engine.ended in ([], ["d"])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), after=st.integers(0, 20))
def test_any_killer_costs_a_few_losses(data: st.DataObject, after: int) -> None:
    engine = Engine({"d": after})
    everything(engine, data)
    assert engine.losses.get("d", 0) <= MOST_LOSSES
    assert ("d" in engine.ended) == bool(engine.losses)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), deadly=st.dictionaries(st.sampled_from("dxyz"), st.integers(0, 8), min_size=1))
def test_several_cost_a_few_losses_for_each_that_ends(data: st.DataObject, deadly: dict[str, int]) -> None:
    engine = Engine(deadly)
    everything(engine, data)
    still = [kept for kept in engine.open if kept.request_id in deadly]
    assert sum(engine.losses.values()) <= MOST_LOSSES * len(engine.ended) + (MOST_LOSSES - 1) * len(still)


def everything(engine: Engine, data: st.DataObject) -> None:
    """Requests come, get tokens and end in any order; the ranks are fast for some and slow for others."""
    names = iter(data.draw(st.permutations("abcdefxyz")))
    for _ in range(data.draw(st.integers(1, 60))):
        what = data.draw(st.sampled_from(["arrive", "step", "step", "step", "all", "end"]))
        if what == "arrive" and (name := next(names, None)) is not None:
            engine.arrive(name)
        elif what == "step" and engine.ran:
            some = data.draw(st.lists(st.sampled_from(engine.ran), unique_by=id, min_size=1))
            for _ in range(data.draw(st.integers(1, 4))):
                engine.step(some)
        elif what == "all":
            engine.all()
        elif what == "end" and engine.open:
            ending = data.draw(st.sampled_from(engine.open))
            if ending.request_id not in engine.deadly:
                engine.end(ending)
    quiet = 0
    while quiet < 60:  # which is more than it takes to clear all and to strike
        before = sum(engine.losses.values())
        engine.all()
        quiet = quiet + 1 if before == sum(engine.losses.values()) else 0
