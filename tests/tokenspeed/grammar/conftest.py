"""A vocabulary of one token a byte, and two that stand for no text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tokenspeed.grammar.state import GrammarState
from tokenspeed.runtime.protocol import Grammar, GrammarKind

EOS = 257
VOCAB_SIZE = 300  # more than the tokenizer has, as in many models


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<start>", "<end>")])
    tokenizer.save(str(directory / "tokenizer.json"))
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
