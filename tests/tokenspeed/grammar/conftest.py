"""Grammars over a vocabulary of one token a byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.byte_tokenizer import EOS, VOCAB_SIZE, write_tokenizer
from tokenspeed.grammar.state import GrammarState
from tokenspeed.runtime.protocol.sampling import Grammar, GrammarKind


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bytes")
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))


@pytest.fixture(scope="session")
def ids(tokenizer: Tokenizer) -> Callable[[str], Sequence[int]]:
    def encode(text: str) -> Sequence[int]:
        encoded: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return encoded

    return encode


@pytest.fixture(scope="session")
def begin(tokenizer_dir: Path) -> Callable[[GrammarKind, str], GrammarState]:
    """The state at the start of a grammar, by the way that it takes to a rank."""
    from xgrammar import CompiledGrammar

    from tokenspeed.grammar.compiler import Compiler
    from tokenspeed.grammar.vocabulary import read_vocabulary

    vocabulary = read_vocabulary(tokenizer_dir, VOCAB_SIZE, [EOS])
    compiler = Compiler(vocabulary)

    def start(kind: GrammarKind, text: str) -> GrammarState:
        compiled = compiler.compile(Grammar(kind=kind, text=text))
        return GrammarState(CompiledGrammar.deserialize_json(compiled.decode(), vocabulary), VOCAB_SIZE)

    return start
