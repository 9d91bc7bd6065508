"""Random numbers that depend on a counter only: the same wherever and with whatever they are drawn."""

from __future__ import annotations

import torch
from torch import Tensor


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for each token id of each row.

    Adding it to log-probabilities and taking the largest sum samples from them (Gumbel-max). An entry depends
    on its row's seed and position and on its token id, not on the other rows.

    Args:
        seeds: int64 [rows].
        positions: int64 [rows].
        vocab_size: number of token ids.

    Returns:
        float32 [rows, vocab_size], finite.
    """
    ids = torch.arange(vocab_size, dtype=torch.int64, device=seeds.device)
    return gumbel_noise_at(seeds, positions, ids)


def gumbel_noise_at(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """`gumbel_noise` at some token ids only: int64 [rows, n] or [n] to float32 [rows, n]."""
    row_key = mix(mix(seeds) + positions)
    bits = mix(row_key.unsqueeze(1) + (ids + 1) * _signed(0x9E3779B97F4A7C15))
    # 40 bits keep small numbers apart, which are those that win; the bound keeps the logarithms finite.
    uniform = (_shift_right(bits, 24).to(torch.float32) + 0.5).mul_(2.0**-40).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def mix(x: Tensor) -> Tensor:
    """A bijection of int64 whose output bits all depend on all input bits: the finaliser of SplitMix64
    (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift of the 64 bits without the sign: torch has no unsigned arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
