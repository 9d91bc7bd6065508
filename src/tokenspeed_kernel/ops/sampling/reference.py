"""Sampling in plain torch, with a sort of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.ops.sampling.noise import gumbel_noise
from tokenspeed_kernel.registry import register_kernel

INF = float("inf")


@register_kernel("sampling", "sample", solution="reference")
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    is_greedy = temperature <= 0
    scores = logits / temperature.masked_fill(is_greedy, 1.0).unsqueeze(1)
    kept = keep_likely(scores, top_k, top_p, min_p)
    noise = gumbel_noise(seeds, positions, logits.shape[1])
    return torch.where(is_greedy, logits.argmax(dim=-1), (kept + noise).argmax(dim=-1))


def keep_likely(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Scores with -inf for what top-k, then top-p and then min-p exclude; the best token always stays.

    Args:
        scores: float32 [rows, vocab_size], divided by the temperature; the rest is as in `sample`.
        top_k: int64 [rows].
        top_p: float32 [rows].
        min_p: float32 [rows].

    Returns:
        A new tensor like `scores`.
    """
    vocab_size = scores.shape[1]
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    kth = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).unsqueeze(1) - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(1, kth), -INF)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    keep = (before < top_p.unsqueeze(1)) | (top_p.unsqueeze(1) >= 1)
    keep &= ordered >= ordered[:, :1] + min_p.log().unsqueeze(1)
    keep[:, 0] = True
    return torch.full_like(scores, -INF).scatter_(1, ids, ordered.masked_fill_(~keep, -INF))
