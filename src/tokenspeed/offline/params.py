"""How an answer is to be sampled, as users of `LLM` say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Nothing of `tokenspeed.runtime` may be imported here: parameters are often made before the `LLM`, whose reloader
# has to see everything of it.


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's parameters; names are those of the OpenAI API and of vLLM.

    Where None is the default, the model's own generation_config.json decides, else the value that is off.
    """

    n: int = 1
    """Answers for each prompt."""
    max_tokens: int | None = 16
    """Most tokens of one answer; None takes as many as fit."""
    min_tokens: int = 0
    """Until then no stop token is chosen, and no stop string ends the answer."""
    temperature: float | None = None
    """0 is greedy; off is 1."""
    top_p: float | None = None
    top_k: int | None = None
    """0 or -1 is off."""
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """What is added to the logits of some token ids."""
    seed: int | None = None
    """The same seed gives the same answer, whatever else runs; None draws one from the `seed` of the `LLM`."""
    stop: str | Sequence[str] = ()
    """Text at which an answer ends; the text itself is cut off."""
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None is off; else each token comes with its log-probability and with those of so many likeliest tokens."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    regex: str | None = None
    """What the answer must match; of the four constraints at most one."""
    json_schema: str | Mapping[str, object] | None = None
    ebnf: str | None = None
    structural_tag: str | Mapping[str, object] | None = None
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
