"""What is done to the logits before a token is chosen from them: bias, then penalties, as in vLLM and transformers,
then the mask of a grammar.

No edit writes the logits that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenspeed.runtime.protocol.sampling import SamplingParams

INF = float("inf")


@dataclass(frozen=True)
class LogitBias:
    """What is added to single logits; -inf forbids a token."""

    index: Tensor
    """int64 [2, entries]: row and token id."""
    values: Tensor
    """float32 [entries]."""

    @classmethod
    def build(
        cls, rows: Sequence[tuple[Sequence[tuple[int, float]], Sequence[int]]], device: torch.device
    ) -> LogitBias | None:
        """From the (token id, addend) pairs and the forbidden ids of each row; None without any."""
        if not any(bias or forbidden for bias, forbidden in rows):
            return None
        ids = [[*(token_id for token_id, _ in bias), *forbidden] for bias, forbidden in rows]
        values: list[float] = []
        for bias, forbidden in rows:
            values.extend(value for _, value in bias)
            values.extend(repeat(-INF, len(forbidden)))
        return cls(_pairs(ids, device), torch.tensor(values, dtype=torch.float32, device=device))

    def apply(self, logits: Tensor) -> Tensor:
        """float32 [rows, vocab_size] to the same shape."""
        rows, ids = self.index
        return logits.index_put((rows, ids), self.values, accumulate=True)


@dataclass(frozen=True)
class Penalties:
    """Repetition, frequency and presence penalty of the rows that have any.

    Repetition is that of Keskar et al., "CTRL" (2019), over prompt and answer, in the form of transformers:
    positive logits are divided by it, others multiplied. Frequency and presence are those of the OpenAI API,
    over the answer: `logit - frequency * count - presence * (count > 0)`.
    """

    rows: Tensor
    """int64 [penalised]: rows of the batch; the other tensors count by index in this one."""
    repetition: Tensor
    """float32 [penalised, 1]; so are the next two."""
    frequency: Tensor
    presence: Tensor
    prompt: Tensor
    """int64 [2, entries]: penalised row and id, each pair once."""
    answer: Tensor
    """int64 [2, entries]: penalised row and id, as often as the answer has it."""

    @classmethod
    def build(
        cls, rows: Sequence[tuple[SamplingParams, Sequence[int], Sequence[int]]], device: torch.device
    ) -> Penalties | None:
        """From the parameters, the ids of the prompt and the tokens of the answer of each row; None without any."""
        penalised = [index for index, (params, _, _) in enumerate(rows) if params.penalised]
        if not penalised:
            return None
        chosen = [rows[index] for index in penalised]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

        return cls(
            rows=torch.tensor(penalised, dtype=torch.int64, device=device),
            repetition=column([params.repetition_penalty for params, _, _ in chosen]),
            frequency=column([params.frequency_penalty for params, _, _ in chosen]),
            presence=column([params.presence_penalty for params, _, _ in chosen]),
            prompt=_pairs([prompt for _, prompt, _ in chosen], device),
            answer=_pairs([answer for _, _, answer in chosen], device),
        )

    def apply(self, logits: Tensor) -> Tensor:
        """float32 [rows, vocab_size] to the same shape."""
        scores = logits[self.rows]
        counts = torch.zeros_like(scores)
        rows, ids = self.answer
        # Sums of ones are exact, in whatever order a device adds them.
        counts.index_put_((rows, ids), counts.new_ones(()), accumulate=True)
        in_answer = counts > 0
        seen = in_answer.index_put((self.prompt[0], self.prompt[1]), in_answer.new_ones(()))
        repeated = torch.where(scores > 0, scores / self.repetition, scores * self.repetition)
        scores = torch.where(seen, repeated, scores) - self.frequency * counts - self.presence * in_answer
        return logits.index_copy(0, self.rows, scores)


@dataclass(frozen=True)
class TokenMask:
    """The ids that some rows may get."""

    rows: Tensor
    """int64 [masked]: rows of the batch."""
    may: Tensor
    """bool [masked, at least vocab_size]."""

    @classmethod
    def build(cls, rows: Sequence[NDArray[np.int32] | None], device: torch.device) -> TokenMask | None:
        """From the words of each row that has a mask, bit i % 32 of word i // 32 for id i; None without any."""
        masked = [(index, words) for index, words in enumerate(rows) if words is not None]
        if not masked:
            return None
        indices, words = zip(*masked, strict=True)
        return cls(torch.tensor(indices, dtype=torch.int64, device=device), _bits(np.stack(words), device))

    def apply(self, logits: Tensor) -> Tensor:
        """float32 [rows, vocab_size] to the same shape, with -inf for every id that a row may not get."""
        may = self.may[:, : logits.shape[1]]
        if len(may) == len(logits):
            return logits.where(may, -INF)
        return logits.index_copy(0, self.rows, logits[self.rows].where(may, -INF))


def _bits(words: NDArray[np.int32], device: torch.device) -> Tensor:
    """bool [rows, 32 * words], from the lowest bit of each int32 [rows, words] on."""
    if device.type == "cpu":
        # numpy unpacks bits ten times faster than torch shifts them.
        return torch.from_numpy(np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(np.bool_))
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    return ((torch.from_numpy(words).to(device).unsqueeze(2) >> shifts) & 1).bool().flatten(1)


def _pairs(ids: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 [2, entries] of (index in `ids`, id)."""
    lengths = [len(row) for row in ids]
    pairs = np.empty((2, sum(lengths)), dtype=np.int64)
    pairs[0] = np.repeat(np.arange(len(ids)), lengths)
    np.concatenate([np.asarray(row, dtype=np.int64) for row in ids], out=pairs[1])
    return torch.from_numpy(pairs).to(device)
