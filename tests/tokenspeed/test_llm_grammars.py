"""Structured output of an `LLM`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.tiny import tiny_llama
from tokenspeed import LLM, SamplingParams
from tokenspeed.errors import RequestError


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(tiny_llama(tmp_path_factory.mktemp("tiny"))), max_total_tokens=2048, max_num_seqs=8) as llm:
        yield llm


def test_answers_follow_their_grammars(llm: LLM) -> None:
    params = [
        SamplingParams(regex="[0-9]{4}-(a|b)", max_tokens=30, n=2),
        SamplingParams(json_schema={"enum": ["red", "green"]}, max_tokens=30),
        SamplingParams(max_tokens=5, temperature=0),
    ]
    digits, colour, plain = llm.generate(["The answer is"] * 3, params)
    assert all(re.fullmatch("[0-9]{4}-[ab]", output.text) for output in digits.outputs)
    assert colour.text in ('"red"', '"green"')
    assert plain.text == llm.generate("The answer is", params[2])[0].text


def test_only_as_many_compiled_grammars_are_kept_as_the_bound_says(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed.offline.grammars.MOST_GRAMMARS", 2)
    words = ["red", "green", "blue", "grey"]
    params = [SamplingParams(regex=word, max_tokens=30) for word in words]
    assert [answer.text for answer in llm.generate(["The colour is"] * 4, params)] == words
    assert len(llm._grammars._compiled) == 2


def test_a_grammar_that_is_not_valid_begins_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError, match="parenthesis"):
        llm.generate(["a", "b"], [SamplingParams(max_tokens=2), SamplingParams(regex="(a")])
    assert llm.generate("a", SamplingParams(max_tokens=2))[0].text
