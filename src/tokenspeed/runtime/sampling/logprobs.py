"""Log-probabilities of chosen tokens and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tokenspeed.runtime.protocol.reports import TokenLogprobs


@dataclass(frozen=True)
class Logprobs:
    """One entry a row, on the device of the logits."""

    chosen: Tensor
    """float32 [rows]."""
    top: Tensor
    """float32 [rows, most]: largest first; so are the ids."""
    top_ids: Tensor
    """int64 [rows, most]."""

    def tolist(self, tops: Sequence[int]) -> list[TokenLogprobs]:
        """Row i with its tops[i] likeliest tokens. Waits for the device."""
        rows = zip(self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist(), tops, strict=True)
        return [TokenLogprobs(chosen, ids[:count], values[:count]) for chosen, ids, values, count in rows]


def token_logprobs(logits: Tensor, token_ids: Tensor, most: int) -> Logprobs:
    """The log-softmax of `logits` at the given ids and at the `most` largest.

    Args:
        logits: float32 [rows, vocab_size], as the model gives them.
        token_ids: int64 [rows].
        most: likeliest tokens of each row, at most the whole vocabulary.
    """
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    top, top_ids = logits.topk(min(most, logits.shape[1]), dim=-1)
    chosen = logits.gather(1, token_ids.unsqueeze(1)) - normaliser
    return Logprobs(chosen.squeeze(1), top - normaliser, top_ids)
