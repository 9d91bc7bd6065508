"""The text of an answer while it grows, up to its stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from tokenspeed.offline.tokenizer import Tokenizer

CONTEXT = 8
"""Last tokens of the prompt that are decoded along: some tokenizers drop the space at the start of a text."""

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class GrowingText:
    """Turns token ids into text that is never taken back. Its first `not_before` tokens complete no stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: tuple[str, ...],
        *,
        skip_special_tokens: bool,
        not_before: int = 0,
    ) -> None:
        self.stopped_at: str | None = None
        """The stop string that was found; nothing is added after it."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._ids = self._context(prompt)
        self._before = self._decode()
        self._decoder = DecodeStream(ids=list(self._ids), skip_special_tokens=skip_special_tokens)
        self._decoded = ""
        self._held = ""
        self._spared = not_before

    def feed(self, ids: Sequence[int]) -> str:
        """Take new tokens; the text that is safe to show because of them."""
        shown = ""
        for token_id in ids:
            if self.stopped_at is not None:
                break
            self._ids.append(token_id)
            text = self._decoder.step(self._tokenizer.backend, token_id) or ""
            self._decoded += text
            shown += self._show(text)
            self._spared = max(0, self._spared - 1)
        return shown

    def finish(self) -> str:
        """The rest: what waited for a stop string or for the rest of a character."""
        if self.stopped_at is not None:
            return ""
        whole, known = self._decode(), self._before + self._decoded
        rest = self._show(whole[len(known) :] if whole.startswith(known) else "")
        if self.stopped_at is not None:
            return rest
        held, self._held = self._held, ""
        return rest + held

    def _show(self, text: str) -> str:
        seen = self._held + text
        # What is found has to end in the new text: a spared token may have completed a stop string before.
        places = [(seen.find(stop, max(0, len(self._held) - len(stop) + 1)), stop) for stop in self._stops]
        found = [(place, stop) for place, stop in places if place >= 0]
        if found and not self._spared:
            where, self.stopped_at = min(found, key=lambda match: match[0])
            self._held = ""
            return seen[:where]
        held = max((n for n in range(1, min(self._longest, len(seen) + 1)) if self._may_stop(seen[-n:])), default=0)
        self._held = seen[len(seen) - held :]
        return seen[: len(seen) - held]

    def _may_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The end of the prompt, unless that breaks off within a character."""
        ids = list(prompt[-CONTEXT:])
        text = self._tokenizer.decode(ids, skip_special_tokens=self._skip)
        return ids if text and not text.endswith(UNFINISHED) else []

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
