"""Where one answer stands in its grammar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from xgrammar import CompiledGrammar, GrammarMatcher

WORD_BITS = 32


class GrammarState:
    """Follows the tokens of one answer. It holds no more than they imply: preemption and reloads leave it alone."""

    def __init__(self, compiled: CompiledGrammar, vocab_size: int) -> None:
        self._matcher = GrammarMatcher(compiled)
        self._vocab_size = vocab_size

    def accept(self, token_id: int) -> bool:
        """Take the next token; False, with nothing changed, when the grammar does not permit it."""
        return self._matcher.accept_token(token_id)

    def allowed(self, forbidden: Sequence[int] = ()) -> NDArray[np.int32]:
        """The tokens that may come next.

        Args:
            forbidden: ids to leave out as well, unless nothing would be left: an answer whose grammar has come to
                its end ends, however many tokens it was to have at least.

        Returns:
            int32 [ceil(vocab_size / 32)]; bit i % 32 of word i // 32 stands for token i.
        """
        words = np.full((1, -(-self._vocab_size // WORD_BITS)), -1, dtype=np.int32)
        self._matcher.fill_next_token_bitmask(words)
        mask = words[0]
        if forbidden:
            rest = mask.copy()
            for token_id in forbidden:
                rest[token_id // WORD_BITS] &= ~np.uint32(1 << token_id % WORD_BITS).view(np.int32)
            if rest.any():
                return rest
        return mask
