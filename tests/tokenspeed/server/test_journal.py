from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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


def lose(journal: Journal, *running: str) -> str | None:
    """Ranks that ran these requests are lost; whose fault that is."""
    for name in running:
        journal.admit(name)
    culprit = journal.lose()
    return None if culprit is None else culprit.request_id


def test_a_request_that_alone_ran_at_two_losses_in_a_row_is_to_blame() -> None:
    journal = Journal()
    for name in "abc":
        journal.accept(entry(name))
    assert lose(journal, "a", "b") is None
    assert lose(journal, "a") == "a"
    assert lose(journal, "b", "c") == "b"


def test_of_several_suspects_none_is_to_blame_until_one_of_them_ran_without_the_others() -> None:
    journal = Journal()
    for name in "abc":
        journal.accept(entry(name))
    lose(journal, "a", "b", "c")
    assert lose(journal, "a", "b") is None
    assert [kept.request_id for kept in journal if kept.suspect] == ["a", "b"]
    assert lose(journal, "b", "c") is None, "c has become a suspect as well"
    assert lose(journal, "c") == "c"


def test_a_token_clears_a_request() -> None:
    journal = Journal()
    journal.accept(entry("a"))
    lose(journal, "a")
    journal.record("a", [4], 0)
    assert lose(journal, "a") is None
    assert lose(journal, "a") == "a"


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
