"""Growing text is the decoded text, up to the first stop string, and nothing shown is ever taken back."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.offline.text import GrowingText
from tokenspeed.offline.tokenizer import Tokenizer

ANSWERS = st.text(alphabet="ab c\N{SNOWMAN}\N{GRINNING FACE}é\n", min_size=1, max_size=40)


def grow(tokenizer: Tokenizer, prompt: str, ids: list[int], stops: tuple[str, ...]) -> tuple[str, GrowingText]:
    growing = GrowingText(tokenizer, tokenizer.encode(prompt), stops, skip_special_tokens=True)
    shown = "".join(growing.feed([token]) for token in ids)
    return shown + growing.finish(), growing


@settings(max_examples=60, deadline=None)
@given(answer=ANSWERS)
def test_without_stops_the_text_is_the_decoded_one(tokenizer: Tokenizer, answer: str) -> None:
    text, _ = grow(tokenizer, "Say something: ", tokenizer.encode(answer), ())
    assert text == answer


@settings(max_examples=100, deadline=None)
@given(answer=ANSWERS, stops=st.lists(st.text(alphabet="ab c\N{SNOWMAN}", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_stop_string(tokenizer: Tokenizer, answer: str, stops: list[str]) -> None:
    ids = tokenizer.encode(answer)
    text, growing = grow(tokenizer, "Say:", ids, tuple(stops))
    # The first token that completes one ends the text; of those that it completes, the one that starts first counts.
    starts = (tokenizer.backend.decode(ids[:count]) for count in range(1, len(ids) + 1))
    first = next(
        (
            min(start.find(stop) for stop in stops if stop in start)
            for start in starts
            if any(stop in start for stop in stops)
        ),
        None,
    )
    assert text == (answer if first is None else answer[:first])
    assert (growing.stopped_at is None) == (first is None)


@settings(max_examples=100, deadline=None)
@given(
    answer=st.text(alphabet="ab c", min_size=1, max_size=40),
    stops=st.lists(st.text(alphabet="ab c", min_size=1, max_size=4), min_size=1, max_size=3),
    spared=st.integers(0, 8),
)
def test_the_first_tokens_complete_no_stop_string(
    tokenizer: Tokenizer, answer: str, stops: list[str], spared: int
) -> None:
    ids = tokenizer.encode(answer)
    growing = GrowingText(
        tokenizer, tokenizer.encode("Say:"), tuple(stops), skip_special_tokens=True, not_before=spared
    )
    text = growing.feed(ids) + growing.finish()
    expected = answer
    for count in range(spared + 1, len(ids) + 1):
        before, now = (len(tokenizer.backend.decode(ids[:end])) for end in (count - 1, count))
        # Only what ends in the text of this token counts.
        starts = [answer.find(stop, max(0, before - len(stop) + 1), now) for stop in stops]
        if any(start >= 0 for start in starts):
            expected = answer[: min(start for start in starts if start >= 0)]
            break
    assert text == expected


def test_half_a_character_waits_for_its_rest(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\N{GRINNING FACE}")
    assert len(ids) > 1
    growing = GrowingText(tokenizer, tokenizer.encode("x"), (), skip_special_tokens=True)
    assert [growing.feed([token]) for token in ids] == [""] * (len(ids) - 1) + ["\N{GRINNING FACE}"]
    assert growing.finish() == ""


def test_a_character_that_never_comes_is_shown_as_missing(tokenizer: Tokenizer) -> None:
    text, _ = grow(tokenizer, "x", tokenizer.encode("\N{GRINNING FACE}")[:1], ())
    assert text == "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_are_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    end = tokenizer.backend.token_to_id("<|im_end|>")
    ids = [*tokenizer.encode("yes"), end]
    assert grow(tokenizer, "x", ids, ())[0] == "yes"
    growing = GrowingText(tokenizer, tokenizer.encode("x"), (), skip_special_tokens=False)
    assert growing.feed(ids) + growing.finish() == "yes<|im_end|>"


def test_what_may_become_a_stop_string_is_held_back_until_the_end(tokenizer: Tokenizer) -> None:
    growing = GrowingText(tokenizer, tokenizer.encode("x"), ("abc",), skip_special_tokens=True)
    assert growing.feed(tokenizer.encode("zab")) == "z"
    assert growing.finish() == "ab"
