"""Whether memory is as it was: sums that tell a changed byte, wherever it is, fast enough for whole models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PIECE = 1 << 23
"""Bytes that are summed at once."""

_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
"""The golden ratio in 64 bits, odd: multiples of it are far apart."""


def checksums(spans: Sequence[Tensor]) -> list[int]:
    """A sum of 64 bits for each of `spans`, modulo 2**64: of its words, each times an odd number of its place.

    Any one changed word changes the sum, since odd factors can be undone; so does nearly any other change, an exchange
    of two words among them. Device and host give the same sums.

    Args:
        spans: on one device, uint8 [bytes], of multiples of 8 bytes.
    """
    if not spans:
        return []
    pieces = max(-(-span.numel() // PIECE) for span in spans)
    factors = _factors(max(pieces, PIECE // 8), spans[0].device)
    return torch.stack([_sum(span.view(torch.int64), factors) for span in spans]).tolist()


def _factors(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device).mul_(_SPREAD).bitwise_or_(1)


def _sum(words: Tensor, factors: Tensor) -> Tensor:
    pieces = words.split(PIECE // 8)
    sums = torch.stack([_dot(piece, factors[: piece.numel()]) for piece in pieces])
    return _dot(sums, factors[: len(pieces)])


def _dot(words: Tensor, factors: Tensor) -> Tensor:
    # One pass, but for integers only the CPU has it.
    return torch.dot(words, factors) if words.device.type == "cpu" else (words * factors).sum()
