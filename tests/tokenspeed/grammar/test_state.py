"""Where an answer stands in its grammar, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.byte_tokenizer import EOS, VOCAB_SIZE
from tokenspeed.grammar.errors import GrammarError

Begin = Callable[[Any, str], Any]
Encode = Callable[[str], Sequence[int]]


def allowed(state: Any, forbidden: Sequence[int] = ()) -> set[int]:
    words = state.allowed(forbidden)
    assert words.dtype == np.int32
    assert words.shape == (-(-VOCAB_SIZE // 32),)
    return {token for token in range(VOCAB_SIZE) if words[token // 32] >> token % 32 & 1}


def follow(state: Any, tokens: Sequence[int]) -> None:
    for token in tokens:
        assert token in allowed(state)
        assert state.accept(token)


def test_only_the_grammar_s_tokens_may_come(begin: Begin, ids: Encode) -> None:
    state = begin("regex", "a(b|c)d")
    assert allowed(state) == set(ids("a"))
    follow(state, ids("a"))
    assert allowed(state) == set(ids("bc"))
    follow(state, ids("cd"))
    assert allowed(state) == {EOS}, "its end may come where the grammar ends, and nothing else"


def test_the_end_may_come_wherever_the_grammar_may_end(begin: Begin, ids: Encode) -> None:
    state = begin("regex", "a+")
    assert EOS not in allowed(state)
    follow(state, ids("aa"))
    assert allowed(state) == {EOS, *ids("a")}


def test_a_token_out_of_the_grammar_is_refused_and_changes_nothing(begin: Begin, ids: Encode) -> None:
    state = begin("regex", "ab")
    assert not state.accept(*ids("b"))
    assert not state.accept(EOS)
    assert not state.accept(VOCAB_SIZE - 1)
    follow(state, ids("ab"))


def test_forbidden_tokens_are_left_out_unless_nothing_would_be_left(begin: Begin, ids: Encode) -> None:
    state = begin("regex", "a{1,2}")
    assert allowed(state, [EOS]) == set(ids("a"))
    follow(state, ids("a"))
    assert allowed(state, [EOS]) == set(ids("a"))
    assert allowed(state, [*ids("a")]) == {EOS}
    follow(state, ids("a"))
    assert allowed(state, [EOS]) == {EOS}


def test_states_of_one_grammar_are_apart(begin: Begin, ids: Encode) -> None:
    first, second = begin("regex", "abc"), begin("regex", "abc")
    follow(first, ids("ab"))
    assert allowed(second) == set(ids("a"))


@pytest.mark.parametrize(
    ("kind", "source", "text", "wrong"),
    [
        ("json_schema", '{"type": "integer"}', "-12", "1.5"),
        ("json_schema", "true", '{"a": [1, null]}', "nothing"),
        ("ebnf", 'root ::= "x" root | "y"', "xxy", "yx"),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "const_string", "value": "ü!"}}', "ü!", "u!"),
        ("regex", "[à-ü]{2}", "éü", "ab"),
    ],
)
def test_each_kind_of_grammar(begin: Begin, ids: Encode, kind: str, source: str, text: str, wrong: str) -> None:
    state = begin(kind, source)
    follow(state, ids(text))
    assert EOS in allowed(state)
    other = begin(kind, source)
    assert not all(other.accept(token) for token in (*ids(wrong), EOS))


def test_white_space_in_json_comes_to_an_end(begin: Begin, ids: Encode) -> None:
    state = begin("json_schema", '{"type": "array", "items": {"type": "null"}, "minItems": 1}')
    follow(state, ids("[ \n\t "))
    assert not allowed(state) & set(ids(" \n\t"))
    follow(state, ids("null]"))


@pytest.mark.parametrize(
    ("kind", "source", "says"),
    [
        ("regex", "(a", "the regex is not valid: Regex parsing error at position 3: The parenthesis is not closed"),
        ("json_schema", "{", "the json_schema is not valid: Failed to parse JSON"),
        ("json_schema", '{"type": "x"}', 'Unsupported type "x"'),
        ("ebnf", "root ::= missing", 'Rule "missing" is not defined'),
        ("structural_tag", "{}", "the structural_tag is not valid"),
        ("regex", "".join(f"[a-{last}]{{1,4000}}" for last in "bcdefgh"), "MiB once compiled"),
    ],
)
def test_what_cannot_be_compiled_is_told_in_one_sentence(begin: Begin, kind: str, source: str, says: str) -> None:
    with pytest.raises(GrammarError) as caught:
        begin(kind, source)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
