"""The grammars that a rank's requests may name."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenspeed.errors import TokenSpeedError
from tokenspeed.grammar.errors import GrammarError

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, TokenizerInfo

    from tokenspeed.grammar.state import GrammarState

# xgrammar takes seconds to import, and is not everywhere: it is imported when the first grammar is on its way.


class Grammars:
    """Compiled grammars by key, for one vocabulary.

    `load` works on a thread of its own while the front compiles the first grammar; what needs its outcome waits for
    it, on every rank for itself.
    """

    def __init__(self, tokenizer_dir: Path | None, vocab_size: int, eos_token_ids: Sequence[int]):
        self.tokenizer_dir = tokenizer_dir
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._thread: threading.Thread | None = None
        self._vocabulary: TokenizerInfo | TokenSpeedError | None = None
        self._compiled: dict[int, CompiledGrammar | TokenSpeedError] = {}

    def load(self) -> None:
        """Begin to load xgrammar and the vocabulary, unless that was begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._load, name="grammars", daemon=True)
            self._thread.start()

    def define(self, key: int, compiled: bytes) -> None:
        """Take a compiled grammar. A fault is kept for the requests that name it."""
        try:
            vocabulary = self._loaded()
            from xgrammar import CompiledGrammar

            self._compiled[key] = CompiledGrammar.deserialize_json(compiled.decode(), vocabulary)
        except TokenSpeedError as error:
            self._compiled[key] = error
        except Exception as error:  # the library raises what it likes
            self._compiled[key] = GrammarError(f"the compiled grammar cannot be read: {error}")

    def forget(self, key: int) -> None:
        """Drop a grammar; the states that were begun go on."""
        self._compiled.pop(key, None)

    def begin(self, key: int | None, generated: Sequence[int] = ()) -> GrammarState:
        """The state of an answer that has the tokens `generated`.

        Raises:
            TokenSpeedError: when the grammar could not be read, or does not permit these tokens.
        """
        compiled = None if key is None else self._compiled.get(key)
        if compiled is None:
            raise GrammarError(f"no grammar with the key {key} is defined")
        if isinstance(compiled, TokenSpeedError):
            raise compiled
        from tokenspeed.grammar.state import GrammarState

        state = GrammarState(compiled, self.vocab_size)
        for token_id in generated:
            if not state.accept(token_id):
                raise GrammarError(f"the answer so far has token {token_id}, which the grammar does not permit")
        return state

    def _loaded(self) -> TokenizerInfo:
        self.load()
        assert self._thread is not None
        self._thread.join()
        if isinstance(self._vocabulary, TokenSpeedError):
            raise self._vocabulary
        assert self._vocabulary is not None
        return self._vocabulary

    def _load(self) -> None:
        try:
            from tokenspeed.grammar.vocabulary import read_vocabulary

            directory = self.tokenizer_dir or Path()
            self._vocabulary = read_vocabulary(directory, self.vocab_size, self.eos_token_ids)
        except TokenSpeedError as error:
            self._vocabulary = error
        except Exception as error:  # not installed as a whole, or in a version that does not fit
            self._vocabulary = GrammarError(f"xgrammar cannot be used: {type(error).__name__}: {error}")
