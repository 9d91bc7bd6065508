"""Sampling on a CPU: rows are looked at first, so that each costs only what it asks for."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.ops.sampling.noise import gumbel_noise, gumbel_noise_at
from tokenspeed_kernel.ops.sampling.reference import keep_likely
from tokenspeed_kernel.registry import register_kernel

WINDOW = 1024
"""Likeliest tokens among which the candidates of a row are looked for before the whole vocabulary is sorted."""

INF = float("inf")


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
    is_filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    greedy, drawn, filtered = (
        rows.nonzero().squeeze(1) for rows in (is_greedy, ~is_greedy & ~is_filtered, ~is_greedy & is_filtered)
    )
    if len(greedy):
        out[greedy] = logits[greedy].argmax(dim=-1)
    # Row by row: what a row needs stays in the core's cache.
    for row in drawn.tolist():
        noise = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], logits.shape[1])[0]
        out[row] = noise.add_(logits[row] / temperature[row]).argmax()
    if len(filtered):
        filters = top_k[filtered], top_p[filtered], min_p[filtered]
        scores = logits[filtered] / temperature[filtered].unsqueeze(1)
        out[filtered] = _sample_filtered(scores, filters, seeds[filtered], positions[filtered])
    return out


def _sample_filtered(
    scores: Tensor, filters: tuple[Tensor, Tensor, Tensor], seeds: Tensor, positions: Tensor
) -> Tensor:
    """A draw from what the filters leave; rows whose candidates the window may lack get the whole vocabulary."""
    kept, ids, certain = _keep_in_window(scores, *filters)
    best = (kept + gumbel_noise_at(seeds, positions, ids)).argmax(dim=-1, keepdim=True)
    out = ids.gather(1, best).squeeze(1)
    rest = (~certain).nonzero().squeeze(1)
    if len(rest):
        likely = keep_likely(scores[rest], *(column[rest] for column in filters))
        noise = gumbel_noise(seeds[rest], positions[rest], scores.shape[1])
        out[rest] = (likely + noise).argmax(dim=-1)
    return out


def _keep_in_window(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `keep_likely` leaves of the likeliest tokens, without a sort of the others.

    Returns:
        float32 and int64 [rows, window]: scores with -inf for what is excluded, and their ids, in the order of
        `keep_likely`; bool [rows]: whether nothing outside of the window can be a candidate.
    """
    window = min(WINDOW, scores.shape[1])
    ids = scores.topk(window, dim=-1, sorted=False).indices.sort(dim=-1).values
    ordered, order = scores.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    k = top_k.unsqueeze(1)
    is_top = (k <= 0) | (ordered >= ordered.gather(1, k.clamp(1, window) - 1))
    by_rank = ordered.masked_fill(~is_top, -INF).logsumexp(dim=-1, keepdim=True)
    probabilities = (ordered - torch.where(k > 0, by_rank, scores.logsumexp(dim=-1, keepdim=True))).exp()
    before = probabilities.cumsum(dim=-1) - probabilities
    keep = is_top & ((before < top_p.unsqueeze(1)) | (top_p.unsqueeze(1) >= 1))
    keep &= ordered >= ordered[:, :1] + min_p.log().unsqueeze(1)
    keep[:, 0] = True
    # Candidates come first in this order, and what is outside equals the last of the window at most.
    certain = keep.sum(dim=-1) <= (ordered > ordered[:, -1:]).sum(dim=-1)
    certain &= (top_k <= 0) | (is_top.sum(dim=-1) <= (ordered > ordered[:, -1:]).sum(dim=-1))
    if window == scores.shape[1]:
        certain = torch.ones_like(certain)
    return ordered.masked_fill_(~keep, -INF), ids, certain
