"""Which compiled grammars the ranks have."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable

from tokenspeed.runtime.protocol.calls import DefineGrammar, ForgetGrammar
from tokenspeed.runtime.protocol.sampling import Grammar

MOST_GRAMMARS = 256
MOST_BYTES = 64 * 2**20
"""Of compiled grammars that the ranks keep for requests to come."""


class Definitions:
    """Sends each grammar once, and has the least recently used ones forgotten.

    The ranks keep what they are told to keep, so that all of them have the same.
    """

    def __init__(self, send: Callable[[DefineGrammar | ForgetGrammar], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._keys: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()
        self._bytes = 0

    def define(self, grammar: Grammar, compiled: bytes, request_id: str = "") -> Grammar:
        """The grammar as a request to the ranks, that with `request_id`, names it; they know it when this returns."""
        source = (grammar.kind, grammar.text)
        if source in self._keys:
            self._keys.move_to_end(source)
        else:
            self._keys[source] = next(self._numbers), len(compiled)
            self._bytes += len(compiled)
            self._send(DefineGrammar(key=self._keys[source][0], compiled=compiled, request_id=request_id))
            self._forget_oldest()
        return Grammar(kind=grammar.kind, text=grammar.text, key=self._keys[source][0])

    def _forget_oldest(self) -> None:
        """The newest stays in any case: a request is about to name it."""
        while len(self._keys) > 1 and (len(self._keys) > MOST_GRAMMARS or self._bytes > MOST_BYTES):
            _, (key, size) = self._keys.popitem(last=False)
            self._bytes -= size
            self._send(ForgetGrammar(key=key))
