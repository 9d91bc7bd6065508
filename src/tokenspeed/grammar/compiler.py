"""From the source of a grammar to its compiled form."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import xgrammar
from xgrammar import CompiledGrammar, TokenizerInfo

from tokenspeed.grammar.errors import GrammarError
from tokenspeed.runtime.protocol.sampling import Grammar

LARGEST_COMPILED = 16 * 2**20
"""Bytes. A rank reads 16 MiB in about half a second, in which it serves nobody."""

MOST_WHITESPACE = 4
"""Characters between two elements of JSON. Without a bound small models go on with line breaks for ever."""

LONGEST_REASON = 300
"""Characters of what xgrammar says; it likes to quote the whole grammar."""

PLACE_IN_XGRAMMAR = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")


class Compiler:
    """Compiles grammars for one vocabulary, on the caller's thread."""

    def __init__(self, vocabulary: TokenizerInfo) -> None:
        self.vocabulary = vocabulary
        self._compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> bytes:
        """What `DefineGrammar` carries.

        Raises:
            GrammarError: with the reason, when the source is not valid or too large once compiled.
            MemoryError: when there is too little.
        """
        compilers: dict[str, Callable[[str], CompiledGrammar]] = {
            "regex": self._compiler.compile_regex,
            "json_schema": partial(self._compiler.compile_json_schema, max_whitespace_cnt=MOST_WHITESPACE),
            "ebnf": self._compiler.compile_grammar,
            "structural_tag": self._compiler.compile_structural_tag,
        }
        try:
            compiled = compilers[grammar.kind](grammar.text).serialize_json().encode()
        except MemoryError:
            raise
        except Exception as error:  # the library raises what it likes, mostly RuntimeError
            if "bad_alloc" in str(error):
                raise MemoryError from error
            raise GrammarError(f"the {grammar.kind} is not valid: {_reason(error)}") from error
        if len(compiled) > LARGEST_COMPILED:
            size = f"{len(compiled) / 2**20:.0f} MiB once compiled, and {LARGEST_COMPILED // 2**20} are the most"
            raise GrammarError(f"the {grammar.kind} has {size}; simplify it, such as by smaller bounds of repetitions")
        return compiled


def _reason(error: Exception) -> str:
    text = PLACE_IN_XGRAMMAR.sub("", str(error)).strip() or type(error).__name__
    reason = " ".join(text.split())
    return reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}…"
