"""How the rows of one step are to be sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.runtime.sampling.edits import LogitBias, Penalties, TokenMask


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One token that is to be sampled."""

    params: SamplingParams
    position: int
    """Index of the token in its sequence."""
    forbidden: Sequence[int] = ()
    """Ids that it must not get."""
    prompt_ids: Sequence[int] = ()
    """Every id of the prompt once; read where a penalty is on."""
    answer_ids: Sequence[int] = ()
    """The tokens of the answer so far; read where a penalty is on."""
    allowed: NDArray[np.int32] | None = None
    """Bit mask [ceil(vocab_size / 32)] of the ids that it may get; None for all."""


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The rows whose log-probabilities are wanted, each with a number of likeliest tokens."""

    rows: list[int]
    tops: list[int]


@dataclass(frozen=True)
class SamplingBatch:
    """One entry a row; the tensors are [rows] on the device of the logits."""

    temperature: Tensor
    """float32; 0 takes the most likely token."""
    top_p: Tensor
    """float32 in (0, 1]; 1 is off."""
    top_k: Tensor
    """int64; 0 is off."""
    min_p: Tensor
    """float32 in [0, 1]; 0 is off."""
    seeds: Tensor
    """int64."""
    positions: Tensor
    """int64: index in its sequence of the token to be sampled."""
    greedy: bool
    """Every temperature is 0."""
    bias: LogitBias | None = None
    penalties: Penalties | None = None
    mask: TokenMask | None = None
    logprobs: LogprobRows | None = None

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], device: torch.device) -> SamplingBatch:
        """The batch whose row i is rows[i]."""
        params = [row.params for row in rows]

        def column(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            temperature=column([p.temperature for p in params], torch.float32),
            top_p=column([p.top_p for p in params], torch.float32),
            top_k=column([p.top_k for p in params], torch.int64),
            min_p=column([p.min_p for p in params], torch.float32),
            seeds=column([_int64(p.seed) for p in params], torch.int64),
            positions=column([row.position for row in rows], torch.int64),
            greedy=all(p.temperature == 0 for p in params),
            bias=LogitBias.build([(p.logit_bias, row.forbidden) for p, row in zip(params, rows, strict=True)], device),
            penalties=Penalties.build(
                [(p, row.prompt_ids, row.answer_ids) for p, row in zip(params, rows, strict=True)], device
            ),
            mask=TokenMask.build([row.allowed for row in rows], device),
            logprobs=_logprob_rows(params),
        )


def _logprob_rows(params: Sequence[SamplingParams]) -> LogprobRows | None:
    wanted = [(row, p.logprobs) for row, p in enumerate(params) if p.logprobs is not None]
    return LogprobRows([row for row, _ in wanted], [top for _, top in wanted]) if wanted else None


def _int64(seed: int) -> int:
    """The seed modulo 2**64, as a signed number."""
    return (seed + 2**63) % 2**64 - 2**63
