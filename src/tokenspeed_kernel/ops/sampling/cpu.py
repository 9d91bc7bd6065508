"""Sampling on a CPU: the vocabulary is sorted for the rows that filter it, and noise is drawn for those that draw."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.ops.sampling.noise import gumbel_noise
from tokenspeed_kernel.ops.sampling.reference import keep_likely
from tokenspeed_kernel.registry import register_kernel


@register_kernel("sampling", "sample", solution="cpu", priority=4, devices=("cpu",))
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    is_greedy = temperature <= 0
    greedy = is_greedy.nonzero().squeeze(1)
    out[greedy] = logits[greedy].argmax(dim=-1)
    is_filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    for filters, chosen in ((False, ~is_greedy & ~is_filtered), (True, ~is_greedy & is_filtered)):
        rows = chosen.nonzero().squeeze(1)
        if len(rows):
            scores = logits[rows] / temperature[rows].unsqueeze(1)
            if filters:
                scores = keep_likely(scores, top_k[rows], top_p[rows], min_p[rows])
            noise = gumbel_noise(seeds[rows], positions[rows], logits.shape[1])
            out[rows] = scores.add_(noise).argmax(dim=-1)
    return out
