"""The open answers of an `LLM`: what the engine says of each, as text and results."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed.offline.outputs import Completion, Delta, Generation, TokenLogprob
from tokenspeed.offline.text import GrowingText
from tokenspeed.runtime.protocol.reports import RequestOutput, TokenLogprobs


class Batch:
    """What one call asked for: its generations, and the deltas that nobody has read yet."""

    def __init__(self, generations: list[Generation]) -> None:
        self.generations = generations
        self.open: dict[str, Answer] = {}
        """By request id."""
        self.deltas: deque[Delta] = deque()
        self.dropped = False
        """The `LLM` was closed before all answers had ended."""


@dataclass
class Answer:
    """One request of a batch."""

    batch: Batch
    generation: Generation
    completion: Completion
    text: GrowingText | None

    def take(self, output: RequestOutput) -> bool:
        """Add what one step produced; whether the answer has ended now."""
        completion, generation = self.completion, self.generation
        ids, logprobs = output.token_ids, output.logprobs
        shown = ""
        if self.text is not None:
            shown = self.text.feed(ids)
        reason = output.finish_reason
        stop: int | str | None = output.matched_stop
        if self.text is not None and reason is not None:
            shown += self.text.finish()
        if self.text is not None and self.text.stopped_at is not None:
            reason, stop = "stop", self.text.stopped_at
        completion.text += shown
        completion.token_ids.extend(ids)
        if completion.logprobs is not None:
            completion.logprobs.extend(map(_logprob, ids, logprobs))
        if output.prompt_logprobs is not None:
            tokens = zip(generation.prompt_token_ids, output.prompt_logprobs, strict=True)
            generation.prompt_logprobs = [None if at is None else _logprob(token, at) for token, at in tokens]
        generation.cached_tokens = max(generation.cached_tokens, output.cached_tokens)
        completion.finish_reason, completion.stop_reason, completion.error = reason, stop, output.error
        self.batch.deltas.append(Delta(generation.index, completion.index, shown, list(ids), reason))
        return reason is not None


def empty_generation(
    index: int, prompt: str | None, prompt_ids: Sequence[int], count: int, *, logprobs: bool
) -> Generation:
    """A generation of `count` answers, none of which has begun."""
    outputs = [Completion(number, logprobs=[] if logprobs else None) for number in range(count)]
    return Generation(index, prompt, list(prompt_ids), outputs)


def _logprob(token_id: int, at: TokenLogprobs) -> TokenLogprob:
    return TokenLogprob(token_id, at.logprob, dict(zip(at.top_ids, at.top_logprobs, strict=True)))
