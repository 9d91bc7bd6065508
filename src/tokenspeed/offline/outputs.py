"""What `LLM` gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of one token by the model's own logits, before temperature and penalties."""

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)
    """Log-probabilities of the likeliest tokens by token id, likeliest first."""


@dataclass
class Completion:
    """One answer."""

    index: int = 0
    """Which of the `n` answers to its prompt."""
    text: str = ""
    """Without the stop string that ended it; "" where the model has no tokenizer."""
    token_ids: list[int] = field(default_factory=list)
    """Without the stop token that ended it."""
    finish_reason: FinishReason | None = None
    """None while it grows."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it."""
    logprobs: list[TokenLogprob] | None = None
    """One for each of `token_ids`, where asked for."""
    error: str = ""
    """Why it failed, when `finish_reason` is error."""


@dataclass
class Generation:
    """All answers to one prompt."""

    index: int
    """Which of the prompts."""
    prompt: str | None
    """None when token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One for each token of the prompt, None for the first, where asked for."""
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first answer."""
        return self.outputs[0].token_ids


@dataclass(frozen=True)
class Delta:
    """What one step added to one answer."""

    index: int
    """Which of the prompts."""
    output: int
    """Which of the `n` answers to it."""
    text: str
    """New text. It may come later than its tokens: half a character, or what may become a stop string, waits."""
    token_ids: list[int]
    finish_reason: FinishReason | None
    """Set in the last one of an answer."""
