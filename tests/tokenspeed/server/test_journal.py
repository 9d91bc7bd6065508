from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.runtime.protocol.blackbox import Work
from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.server.journal import Entry, Journal


def entry(name: str, prompt: list[int] | None = None) -> Entry:
    return Entry(name, name, prompt or [1, 2, 3], SamplingParams(max_new_tokens=8, seed=7))


def test_an_entry_has_the_tokens_so_far() -> None:
    journal = Journal()
    journal.accept(entry("a", [5, 6, 7]))
    journal.record("a", [10, 11], 2)
    journal.record("a", [12], 0)

    (kept,) = journal.unfinished()
    assert kept.tokens == [10, 11, 12]
    assert kept.cached_tokens == 2


def test_unfinished_requests_come_in_order_of_arrival_without_the_abandoned() -> None:
    journal = Journal()
    for name in ("c", "a", "b"):
        journal.accept(entry(name))
    assert journal.abandon("a")
    assert not journal.abandon("a")

    assert [kept.request_id for kept in journal.unfinished()] == ["c", "b"]
    assert len(journal) == 3


def test_an_abandoned_request_takes_no_more_tokens_and_goes_when_the_engine_ends_it() -> None:
    journal = Journal()
    journal.accept(entry("a"))
    journal.abandon("a")
    journal.record("a", [4], 0)
    assert [kept.tokens for kept in journal] == [[]]

    journal.end("a")
    assert len(journal) == 0


def test_what_ran_is_told_by_what_came_and_by_what_was_left() -> None:
    journal = Journal()
    for name in "abcd":
        journal.accept(entry(name))
        journal.get(name).given = True  # type: ignore[union-attr]
    journal.admit("a")
    work = Work(ran=frozenset({"b", "of an answer that has ended"}), taken=frozenset({"c"}))
    assert [kept.request_id for kept in journal.lose(work)] == ["a", "b", "c"]
    assert [kept.request_id for kept in journal if kept.admitted] == ["a", "b"]
    assert not any(kept.given or kept.running for kept in journal)
    assert journal.lose(Work()) == []


def test_unknown_ids_are_ignored() -> None:
    journal = Journal()
    journal.record("x", [1], 0)
    journal.end("x")
    assert not journal.abandon("x")


@given(st.lists(st.tuples(st.sampled_from(["record", "abandon", "end"]), st.integers(0, 4)), max_size=60))
def test_a_request_is_kept_until_its_end_and_no_longer(actions: list[tuple[str, int]]) -> None:
    journal = Journal()
    for number in range(5):
        journal.accept(entry(str(number)))
    ended: set[str] = set()
    for action, number in actions:
        name = str(number)
        if action == "record":
            journal.record(name, [number], 0)
        elif action == "abandon":
            journal.abandon(name)
        else:
            journal.end(name)
            ended.add(name)
    assert {kept.request_id for kept in journal} == {str(n) for n in range(5)} - ended
