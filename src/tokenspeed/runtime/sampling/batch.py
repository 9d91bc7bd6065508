"""How the rows of one step are to be sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.runtime.protocol import SamplingParams


@dataclass(frozen=True)
class SamplingBatch:
    """One entry a row; the tensors are [rows] on the device of the logits."""

    temperature: Tensor
    """float32; 0 takes the most likely token."""
    top_p: Tensor
    """float32 in (0, 1]; 1 is off."""
    top_k: Tensor
    """int64; 0 is off."""
    seeds: Tensor
    """int64."""
    positions: Tensor
    """int64: index in its sequence of the token to be sampled."""
    greedy: bool
    """Every temperature is 0."""
    filtered: bool = True
    """Some row may have top_p or top_k on; False spares a sort of the vocabulary."""
    forbidden: Sequence[tuple[int, Sequence[int]]] = ()
    """(row, token ids that it must not get)."""

    @classmethod
    def build(
        cls,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        device: torch.device,
        forbidden: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> SamplingBatch:
        """The batch whose row i follows params[i] and samples the token of index positions[i]."""
        return cls(
            temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
            top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
            seeds=torch.tensor([_int64(p.seed) for p in params], dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            greedy=all(p.temperature == 0 for p in params),
            filtered=any(p.temperature > 0 and (p.top_p < 1 or p.top_k > 0) for p in params),
            forbidden=forbidden,
        )


def _int64(seed: int) -> int:
    """The seed modulo 2**64, as a signed number."""
    return (seed + 2**63) % 2**64 - 2**63
