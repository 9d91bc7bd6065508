"""The grammars of a rank, and answers that go on in the middle of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tokenspeed.grammar.compiler import Compiler
from tokenspeed.grammar.errors import GrammarError
from tokenspeed.grammar.vocabulary import read_vocabulary
from tokenspeed.runtime.config import ModelOptions
from tokenspeed.runtime.engine.grammars import Grammars
from tokenspeed.runtime.loader.source import resolve
from tokenspeed.runtime.protocol.sampling import Grammar


@pytest.fixture(scope="module")
def tokenizer_dir() -> Path:
    directory = resolve(ModelOptions(model="smollm2"), lambda _: None).tokenizer_dir
    assert directory is not None
    return directory


@pytest.fixture(scope="module")
def grammars(tokenizer_dir: Path) -> Grammars:
    config = json.loads((tokenizer_dir / "config.json").read_text())
    vocab_size, eos = config["vocab_size"], [config["eos_token_id"]]
    compiler = Compiler(read_vocabulary(tokenizer_dir, vocab_size, eos))
    grammars = Grammars(tokenizer_dir, vocab_size, eos)
    grammars.define(7, compiler.compile(Grammar(kind="regex", text="(yes|no), (yes|no)!")))
    return grammars


def test_an_answer_goes_on_where_its_tokens_have_led(grammars: Grammars, tokenizer_dir: Path) -> None:
    tokens = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json")).encode("yes, no!").ids
    whole = grammars.begin(7)
    for count, token_id in enumerate(tokens):
        resumed = grammars.begin(7, tokens[:count])
        assert (resumed.allowed() == whole.allowed()).all()
        assert whole.accept(token_id)
        assert resumed.accept(token_id)


def test_tokens_that_the_grammar_does_not_permit_are_refused(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match="does not permit"):
        grammars.begin(7, [0])


def test_a_key_that_nobody_defined_is_refused(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match="key 8"):
        grammars.begin(8)
