"""Stop strings. The ranks see token ids only, so the front watches the text of requests that have some."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from tokenspeed.errors import ModelError, RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TokenizerFile:
    """The model's tokenizer, read once and in a thread."""

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None
        self._lock = asyncio.Lock()

    async def load(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            RequestError: when the model has no tokenizer.json.
            ModelError: when that is damaged.
        """
        async with self._lock:
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(self._read)
            return self._tokenizer

    def _read(self) -> Tokenizer:
        from tokenizers import Tokenizer

        if not self._path.is_file():
            raise RequestError(f"stop strings need {self._path}, which does not exist; use stop_token_ids instead")
        try:
            return Tokenizer.from_file(str(self._path))
        except Exception as error:  # the library raises no other type
            raise ModelError(f"{self._path} cannot be read ({error}); download it again") from error


class StopWatcher:
    """Looks for the first of some strings in the text of a growing answer, whose first `not_before` tokens end none."""

    def __init__(
        self, tokenizer: Tokenizer, stops: tuple[str, ...], *, skip_special_tokens: bool, not_before: int = 0
    ) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stops = stops
        self._decoder = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._overlap = max(map(len, stops)) - 1
        self._tail = ""
        self._spared = not_before

    def feed(self, token_id: int) -> str | None:
        """Take the next token; the stop string that it completes, or None.

        Where one token completes several, the one that starts first in the text wins.
        """
        spared, self._spared = self._spared > 0, max(0, self._spared - 1)
        text = self._decoder.step(self._tokenizer, token_id)
        if not text:
            return None
        seen = self._tail + text
        if not spared:
            # What is found has to end in the new text: a spared token may have completed a stop string before.
            places = [(seen.find(stop, max(0, len(self._tail) - len(stop) + 1)), stop) for stop in self._stops]
            found = [(place, stop) for place, stop in places if place >= 0]
            if found:
                return min(found, key=lambda match: match[0])[1]
        self._tail = seen[-self._overlap :] if self._overlap else ""
        return None
