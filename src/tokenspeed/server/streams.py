"""The answer to one request on its way from the engine to the client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tokenspeed.errors import TokenSpeedError
from tokenspeed.runtime.protocol import FinishReason, RequestOutput
from tokenspeed.server.stops import StopWatcher


@dataclass
class Update:
    """What has come since the last look: several steps in one when the client is slow."""

    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    matched_token: int | None = None
    matched_string: str | None = None
    error: str = ""

    @property
    def generated(self) -> int:
        """Tokens that were sampled: a stop token counts, though it is not among `token_ids`."""
        return len(self.token_ids) + (self.matched_token is not None)


class TokenStream:
    """A one-reader queue whose waiting items melt into one, so that it never holds more than the answer."""

    def __init__(self, watcher: StopWatcher | None = None) -> None:
        self._watcher = watcher
        self._pending = Update()
        self._news = asyncio.Event()
        self._failure: TokenSpeedError | None = None

    def push(self, output: RequestOutput) -> Update:
        """Add what one step produced, up to and including the token that completes a stop string.

        Returns what this step added. When it has a `matched_string` the engine does not know yet that
        the request is over.
        """
        step = Update(output.token_ids, output.cached_tokens, output.finish_reason, output.matched_stop)
        step.error = output.error
        if self._watcher is not None:
            self._cut(step, self._watcher)
        pending = self._pending
        pending.token_ids.extend(step.token_ids)
        pending.cached_tokens = max(pending.cached_tokens, step.cached_tokens)
        pending.finish_reason = step.finish_reason
        pending.matched_token = step.matched_token
        pending.matched_string = step.matched_string
        pending.error = step.error
        self._news.set()
        return step

    def fail(self, error: TokenSpeedError) -> None:
        """Make the reader raise `error` instead of waiting for more."""
        self._failure = error
        self._news.set()

    async def next(self) -> Update:
        """Wait for more and take all of it."""
        await self._news.wait()
        if self._failure is not None:
            raise self._failure
        self._news.clear()
        update, self._pending = self._pending, Update()
        return update

    @staticmethod
    def _cut(step: Update, watcher: StopWatcher) -> None:
        for index, token_id in enumerate(step.token_ids):
            matched = watcher.feed(token_id)
            if matched is not None:
                step.token_ids = step.token_ids[: index + 1]
                step.finish_reason = "stop"
                step.matched_string = matched
                step.matched_token = None
                return
