"""Where a streamed answer is cut, so that its log-probabilities come through the gateway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenspeed.runtime.protocol.reports import TokenLogprobs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Chunk = tuple[list[int], list[TokenLogprobs]]
"""Tokens, and their log-probabilities where they were asked for."""


class TextCuts:
    """Cuts one answer so that each chunk brings text that the gateway shows.

    The gateway drops a chunk that brings none, and with it the log-probabilities of its tokens: a part of a character,
    a special token, or what may be the beginning of a stop string. So tokens are kept until text comes. Where there are
    stop strings, the last tokens whose text was shown are kept as well: what follows them may be shown at the end only.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, skip_special_tokens: bool) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stops = stops
        self._decoder = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._unshown = ""
        """Text that may be the beginning of a stop string."""
        self._kept = 0
        self._with_text = 0
        """Kept tokens up to the last one that completed some text."""
        self._with_shown_text = 0
        """Kept tokens up to the last one after which more text was shown."""

    def feed(self, token_ids: Sequence[int]) -> int:
        """Take the next tokens; how many of all that are kept, the oldest first, are to be sent now."""
        ready = 0
        for token_id in token_ids:
            self._kept += 1
            text = self._decoder.step(self._tokenizer, token_id)
            if text:
                self._with_text = self._kept
                if self._shows(text):
                    ready, self._with_shown_text = self._with_shown_text, self._kept
        if not self._stops:
            ready = self._with_shown_text
        self._kept -= ready
        self._with_text -= ready
        self._with_shown_text -= ready
        return ready

    def at_end(self, stopped: bool) -> int:
        """How many of the kept tokens bring text now that the answer has ended, by a stop string or otherwise."""
        return self._with_shown_text if stopped else self._with_text

    def _shows(self, text: str) -> bool:
        text = self._unshown + text
        shown = len(text) - self._beginning(text)
        self._unshown = text[shown:]
        return shown > 0

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string may begin."""
        longest = min(len(text), max(map(len, self._stops), default=0))
        return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)


class Unsent:
    """The tokens of one streamed answer that no chunk has yet; without `cuts` none is kept back."""

    def __init__(self, cuts: TextCuts | None) -> None:
        self._cuts = cuts
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def __len__(self) -> int:
        return len(self._token_ids)

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Chunk:
        """Take the next tokens, and give those that are to be sent now.

        `logprobs` has one for each of them, or is empty; one more, of a stop token that is not sent, is ignored.
        """
        self._token_ids.extend(token_ids)
        self._logprobs.extend(logprobs[: len(token_ids)])
        return self._take(len(token_ids) if self._cuts is None else self._cuts.feed(token_ids))

    def rest(self, stopped: bool) -> list[Chunk]:
        """What is left when the answer has ended, by a stop string whose text is not shown or otherwise."""
        if self._cuts is None:
            return []
        return [self._take(self._cuts.at_end(stopped)), self._take(len(self))]

    def _take(self, count: int) -> Chunk:
        chunk = self._token_ids[:count], self._logprobs[:count]
        self._token_ids, self._logprobs = self._token_ids[count:], self._logprobs[count:]
        return chunk
