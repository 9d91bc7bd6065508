"""Grammars of an `LLM`, compiled in the caller's own process: it waits for them anyway."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from tokenspeed.grammar.definitions import MOST_BYTES, MOST_GRAMMARS, Definitions
from tokenspeed.grammar.errors import GrammarError, is_installed
from tokenspeed.runtime.protocol.calls import ToEngine
from tokenspeed.runtime.protocol.sampling import Grammar, SamplingParams
from tokenspeed.runtime.protocol.state import EngineInfo

if TYPE_CHECKING:
    from tokenspeed.grammar.compiler import Compiler


class OfflineGrammars:
    """Compiles each grammar once and has the ranks know it. As many compiled ones are kept as the ranks keep."""

    def __init__(self, info: EngineInfo, send: Callable[[ToEngine], None]) -> None:
        self._info = info
        self._definitions = Definitions(send)
        self._compiled: OrderedDict[Grammar, bytes] = OrderedDict()
        self._compiler: Compiler | None = None

    def compile(self, sampling: SamplingParams) -> None:
        """Compile the grammar of a request, if it has one.

        Raises:
            GrammarError: when that cannot be done.
        """
        grammar = sampling.grammar
        if grammar is not None:
            self._compiled_form(grammar)

    def defined(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters as the ranks take them; their grammar has been compiled."""
        grammar = sampling.grammar
        if grammar is None:
            return sampling
        known = self._definitions.define(grammar, self._compiled_form(grammar))
        return msgspec.structs.replace(sampling, grammar=known)

    def _compiled_form(self, grammar: Grammar) -> bytes:
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar]
        compiled = self._compiled[grammar] = self._ready().compile(grammar)
        while len(self._compiled) > 1 and (
            len(self._compiled) > MOST_GRAMMARS or sum(map(len, self._compiled.values())) > MOST_BYTES
        ):
            self._compiled.popitem(last=False)
        return compiled

    def _ready(self) -> Compiler:
        if self._compiler is None:
            if not is_installed():
                raise GrammarError("structured output needs xgrammar; run `pip install 'tokenspeed[structured]'`")
            from tokenspeed.grammar.compiler import Compiler
            from tokenspeed.grammar.vocabulary import read_vocabulary

            info = self._info
            if not info.eos_token_ids:
                raise GrammarError("structured output needs a model with an end-of-text token; this one has none")
            self._compiler = Compiler(read_vocabulary(info.tokenizer_path, info.vocab_size, info.eos_token_ids))
        return self._compiler
