"""One request, from its submission to its last token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from tokenspeed.runtime.cache.manager import BlockTable
from tokenspeed.runtime.protocol.reports import TokenLogprobs
from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.runtime.scheduler.history import TokenHistory


class RequestState(Enum):
    """Where a request is. A finished one may still hold blocks, while a step that uses them is in flight."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class TokenGrammar(Protocol):
    """Where one answer stands in its grammar; see `tokenspeed.grammar.state`."""

    def accept(self, token_id: int) -> bool:
        """Take the next token; False when the grammar does not permit it."""
        ...

    def allowed(self, forbidden: Sequence[int] = ()) -> Any:
        """The tokens that may come next, as a bit mask."""
        ...


@dataclass(eq=False, slots=True)
class Request:
    """What the scheduler knows of one request. Callers give the first seven fields and change none."""

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    shares_prompt_with: str | None = None
    """As in `Submit`."""
    grammar: TokenGrammar | None = None
    """Its state after `generated`."""
    generated: list[int] = field(default_factory=list)
    """As in `Submit`: the answer goes on behind them as if they had been sampled here."""
    admitted: bool = False
    """As in `Submit`."""

    state: RequestState = field(default=RequestState.WAITING, init=False)
    started: bool = field(default=False, init=False)
    """It was admitted here at least once."""
    token_ids: list[int] = field(default_factory=list, init=False)
    """The prompt, then the tokens that were committed."""
    table: BlockTable = field(default_factory=BlockTable, init=False, repr=False)
    num_scheduled: int = field(default=0, init=False)
    """Tokens whose KV is computed, or will be once the steps in flight are done."""
    row: int = field(default=0, init=False)
    """Row of this request in the last step that it was part of."""
    in_flight: int = field(default=0, init=False)
    """Uncommitted steps that this request is part of."""
    cached_tokens: int = field(default=0, init=False)
    """Prompt tokens found in the prefix index at the first admission."""
    length_limit: int = field(default=0, init=False)
    """The request ends when it has this many tokens, prompt included."""
    stop_ids: tuple[int, ...] = field(default=(), init=False)
    """Ids that end the request when sampled, without duplicates."""
    stops_from: int = field(default=0, init=False)
    """Stop ids are forbidden for tokens at an index below this one, prompt included."""
    history: TokenHistory | None = field(default=None, init=False, repr=False)
    """The tokens so far, where penalties need them."""
    prompt_logprobs: list[TokenLogprobs | None] | None = field(default=None, init=False, repr=False)
    """Of the prompt's tokens as far as they are known; None when they were not asked for or have been sent."""

    def bind(self, eos_token_ids: tuple[int, ...], max_len: int) -> None:
        """Work out when this request ends. `max_len` is the longest prompt and answer together, in tokens."""
        sampling = self.sampling
        # The end of a text is part of its grammar.
        eos = () if sampling.ignore_eos and self.grammar is None else eos_token_ids
        self.token_ids = [*self.prompt, *self.generated]
        self.stop_ids = tuple(dict.fromkeys((*eos, *sampling.stop_token_ids)))
        self.stops_from = len(self.prompt) + sampling.min_new_tokens
        self.length_limit = min(len(self.prompt) + sampling.max_new_tokens, max_len)
        self.history = TokenHistory(self.prompt, self.generated) if sampling.penalised else None
        # They went out with the first token.
        told = sampling.prompt_logprobs is None or self.generated
        self.prompt_logprobs = None if told else [None] * len(self.prompt)

    def append(self, token_id: int) -> None:
        """Take the next token of the answer."""
        self.token_ids.append(token_id)
        if self.history is not None:
            self.history.answer_ids.append(token_id)
