"""The answers to one request on their way from the engine to the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from tokenspeed.errors import TokenSpeedError
from tokenspeed.runtime.protocol.reports import FinishReason, RequestOutput, TokenLogprobs
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
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Where asked for: one for each of `token_ids`, then one for `matched_token` if there is one."""
    weight_version: str = ""
    """What computed the last of these tokens."""

    @property
    def generated(self) -> int:
        """Tokens that were sampled: a stop token counts, though it is not among `token_ids`."""
        return len(self.token_ids) + (self.matched_token is not None)


class TokenStream:
    """One answer: a queue whose waiting items melt into one, so that it never holds more than the answer.

    `news` is set when there is something to take; answers that have one reader share it.
    """

    def __init__(self, watcher: StopWatcher | None = None, news: asyncio.Event | None = None) -> None:
        self._watcher = watcher
        self._pending: Update | None = None
        self._news = news or asyncio.Event()
        self._failure: TokenSpeedError | None = None

    def push(self, output: RequestOutput, weight_version: str = "") -> Update:
        """Add what one step produced, up to and including the token that completes a stop string.

        Returns what this step added. When it has a `matched_string` the engine does not know yet that
        the request is over.
        """
        step = Update(output.token_ids, output.cached_tokens, output.finish_reason, output.matched_stop)
        step.error, step.weight_version = output.error, weight_version
        step.logprobs = output.logprobs
        if self._watcher is not None:
            self._cut(step, self._watcher)
        pending = self._pending = self._pending or Update()
        pending.token_ids.extend(step.token_ids)
        pending.logprobs.extend(step.logprobs)
        pending.cached_tokens = max(pending.cached_tokens, step.cached_tokens)
        pending.finish_reason = step.finish_reason
        pending.matched_token = step.matched_token
        pending.matched_string = step.matched_string
        pending.error = step.error
        pending.weight_version = step.weight_version
        self._news.set()
        return step

    def fail(self, error: TokenSpeedError) -> None:
        """Make the reader raise `error` instead of waiting for more."""
        self._failure = error
        self._news.set()

    def take(self) -> Update | None:
        """All that has come, or None.

        Raises:
            TokenSpeedError: what `fail` was given.
        """
        if self._failure is not None:
            raise self._failure
        update, self._pending = self._pending, None
        return update

    @staticmethod
    def _cut(step: Update, watcher: StopWatcher) -> None:
        for index, token_id in enumerate(step.token_ids):
            matched = watcher.feed(token_id)
            if matched is not None:
                step.token_ids = step.token_ids[: index + 1]
                step.logprobs = step.logprobs[: index + 1]
                step.finish_reason = "stop"
                step.matched_string = matched
                step.matched_token = None
                return


async def updates(streams: Sequence[TokenStream], news: asyncio.Event) -> AsyncIterator[tuple[int, Update]]:
    """(index, what has come for that answer) until all have ended; `news` is the one that the streams share.

    Raises:
        TokenSpeedError: of the first stream that fails.
    """
    unfinished = set(range(len(streams)))
    while unfinished:
        await news.wait()
        news.clear()
        for index in sorted(unfinished):
            update = streams[index].take()
            if update is not None:
                if update.finish_reason is not None:
                    unfinished.remove(index)
                yield index, update
