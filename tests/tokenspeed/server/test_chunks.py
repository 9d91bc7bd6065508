"""Where a streamed answer is cut: no chunk is without text that the gateway shows."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tokenspeed.runtime.protocol.reports import TokenLogprobs
from tokenspeed.server.chunks import TextCuts, Unsent


def chunked(tokenizer: Tokenizer, steps: list[list[int]], *stops: str, stopped: bool = False) -> list[list[int]]:
    """The chunks of an answer that comes in `steps`."""
    unsent = Unsent(TextCuts(tokenizer, stops, skip_special_tokens=True))
    chunks = [unsent.add(ids, [TokenLogprobs(-float(token_id), [], []) for token_id in ids]) for ids in steps]
    chunks += unsent.rest(stopped)
    assert not len(unsent)
    assert all([-each.logprob for each in found] == sent for sent, found in chunks)
    return [sent for sent, _ in chunks if sent]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def singly(ids: list[int]) -> list[list[int]]:
    return [[token_id] for token_id in ids]


@pytest.mark.parametrize(("text", "sizes"), [("abc", [1, 1, 1]), ("a🙂b", [1, 4, 1]), ("🙂é", [4, 2])])
def test_a_chunk_ends_where_text_comes(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    assert [len(chunk) for chunk in chunked(tokenizer, singly(ids_of(tokenizer, text)))] == sizes


def test_what_ends_without_text_comes_apart(tokenizer: Tokenizer) -> None:
    cut_short = ids_of(tokenizer, "a🙂")[:-1]
    assert chunked(tokenizer, singly(cut_short)) == [cut_short[:1], cut_short[1:]]
    skipped = [*ids_of(tokenizer, "a"), 257, 257]
    assert chunked(tokenizer, singly(skipped), "b") == [skipped[:1], skipped[1:]]


def test_what_may_begin_a_stop_string_waits_for_what_is_shown(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "a wordy world")
    assert chunked(tokenizer, singly(ids), " world", stopped=True) == [ids[:1], ids[1:6], ids[6:7], ids[7:]]
    assert chunked(tokenizer, singly(ids), " worldly") == [ids[:1], ids[1:6], ids[6:]]


def test_several_tokens_at_a_time_are_cut_alike(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "ab🙂cd")
    assert chunked(tokenizer, [ids[:3], ids[3:7], ids[7:]]) == [ids[:2], ids[2:7], ids[7:]]


def test_without_a_tokenizer_nothing_waits() -> None:
    unsent = Unsent(None)
    assert (unsent.add([7, 8], []), unsent.rest(stopped=False)) == (([7, 8], []), [])


def shown(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> int:
    """Characters that a reader sees of an answer so far."""
    text = tokenizer.decode(ids).rstrip("�")
    held = [n for stop in stops for n in range(1, len(stop) + 1) if text.endswith(stop[:n])]
    return len(text) - max(held, default=0)


@settings(deadline=None)
@given(
    st.text("ab é🙂", max_size=12),
    st.integers(0, 3),
    st.lists(st.text("ab é🙂", min_size=1, max_size=4), max_size=2),
    st.lists(st.integers(1, 5), min_size=40, max_size=40),
)
def test_every_chunk_before_the_end_shows_something(
    tokenizer: Tokenizer, text: str, missing: int, stops: list[str], sizes: list[int]
) -> None:
    ids = ids_of(tokenizer, text)
    ids = ids[: len(ids) - missing]
    steps, start = [], 0
    for size in sizes:
        steps.append(ids[start : start + size])
        start += size
    assert start >= len(ids)
    chunks = chunked(tokenizer, steps, *stops)
    assert [token_id for chunk in chunks for token_id in chunk] == ids
    seen = [0]
    for end in range(1, len(chunks) + 1):
        so_far = [token_id for chunk in chunks[:end] for token_id in chunk]
        seen.append(max(shown(tokenizer, so_far[:n], stops) for n in range(len(so_far) + 1)))
    assert all(before < after for before, after in pairwise(seen[:-2]))
