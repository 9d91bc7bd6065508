"""How the tokens of an answer are chosen, as a request tells it."""

from __future__ import annotations

from typing import Literal

import msgspec

GrammarKind = Literal["regex", "json_schema", "ebnf", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of an answer must look like; `text` is the source in the language that `kind` names."""

    kind: GrammarKind
    text: str
    key: int | None = None
    """Of its `DefineGrammar`, when it reaches a rank."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one answer are chosen.

    `seed` is always set when it reaches a rank: the front draws one for a request that brings none, so that all
    ranks agree. A request for several answers is one request each here, with a seed each.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """Least probability of a candidate, as a share of the most likely token's; 0 is off."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the answer has."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each time that the answer has it."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens that prompt or answer have; 1 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), each id once."""
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None is off; else each token comes with its log-probability and with those of so many likeliest tokens."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    grammar: Grammar | None = None

    @property
    def penalised(self) -> bool:
        """Whether what is chosen depends on how often the tokens so far have which id."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def needs_history(self) -> bool:
        """Whether a token can be sampled only once the one before it is known on the host."""
        return self.penalised or self.grammar is not None

    @property
    def plain(self) -> bool:
        """Whether temperature, top-k, top-p, min-p and the seed are all that the choice of a token needs."""
        return not (self.needs_history or self.logit_bias or self.logprobs is not None)


def choice_seed(seed: int, index: int) -> int:
    """The seed of answer `index` of a request for several, signed 64 bits; answer 0 has the request's own.

    Each is a SplitMix64 output (Steele, Lea and Flood, 2014), so that neighbouring seeds share no answers.
    """
    bits = seed % 2**64
    if index:
        bits = (bits + index * 0x9E3779B97F4A7C15) % 2**64
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
        bits ^= bits >> 31
    return bits - 2**64 if bits >> 63 else bits
