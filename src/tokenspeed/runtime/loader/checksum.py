"""Whether memory is as it was: sums that tell a changed byte, wherever it is, fast enough for whole models."""

from __future__ import annotations

import torch
from torch import Tensor

PIECE = 1 << 23
"""Bytes that have a sum of their own."""

_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
"""The golden ratio in 64 bits, odd: multiples of it are far apart."""


def checksums(memory: Tensor) -> list[int]:
    """A sum of 64 bits for each piece of `memory`, modulo 2**64: of its words, each times an odd number of its place.

    Any one changed word changes the sum, since odd factors can be undone; so does nearly any other change, an exchange
    of two words among them. Device and host give the same sums.

    Args:
        memory: uint8 [bytes], of a multiple of 8 bytes.
    """
    words = memory.view(torch.int64)
    factors = torch.arange(min(PIECE // 8, words.numel()), device=memory.device).mul_(_SPREAD).bitwise_or_(1)
    sums = [_sum(piece, factors[: piece.numel()]) for piece in words.split(PIECE // 8)]
    return torch.stack(sums).tolist() if sums else []


def _sum(words: Tensor, factors: Tensor) -> Tensor:
    # One pass, but for integers only the CPU has it.
    return torch.dot(words, factors) if words.device.type == "cpu" else (words * factors).sum()
