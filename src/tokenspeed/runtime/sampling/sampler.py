"""From logits to token ids."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed.runtime.sampling.batch import SamplingBatch
from tokenspeed_kernel.ops.sampling.noise import gumbel_noise


class Sampler:
    """Greedy, or temperature, then top-k, then top-p, then a draw fixed by seed and position."""

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """One token id a row.

        Args:
            logits: float32 [rows, vocab_size]; not written.
            batch: of as many rows.

        Returns:
            int64 [rows]. Of equal candidates the lowest id is taken.
        """
        if batch.forbidden:
            logits = forbid(logits, batch)
        greedy = logits.argmax(dim=-1)
        if batch.greedy:
            return greedy
        is_greedy = batch.temperature <= 0
        scores = logits / batch.temperature.masked_fill(is_greedy, 1.0).unsqueeze(1)
        if batch.filtered:
            scores = keep_top(scores, batch.top_k, batch.top_p)
        noise = gumbel_noise(batch.seeds, batch.positions, logits.shape[1])
        return torch.where(is_greedy, greedy, (scores + noise).argmax(dim=-1))


def forbid(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """A copy of the logits without the forbidden ids."""
    rows = [row for row, ids in batch.forbidden for _ in ids]
    columns = [token_id for _, ids in batch.forbidden for token_id in ids]
    index = torch.tensor([rows, columns], dtype=torch.int64, device=logits.device)
    return logits.index_put((index[0], index[1]), logits.new_tensor(float("-inf")))


def keep_top(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Scores with -inf for what top-k and then top-p exclude; the best token always stays.

    Top-k keeps the k highest scores, and what equals the k-th. Top-p keeps, of what is left, the most likely
    tokens until their probabilities reach p; of equal scores the lower id comes first.

    Args:
        scores: float32 [rows, vocab_size], divided by the temperature.
        top_k: int64 [rows]; 0 is off.
        top_p: float32 [rows].
    """
    vocab_size = scores.shape[1]
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    kth = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).unsqueeze(1) - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(1, kth), float("-inf"))
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    keep = (before < top_p.unsqueeze(1)) | (top_p.unsqueeze(1) >= 1)
    keep[:, 0] = True
    return torch.full_like(scores, float("-inf")).scatter_(1, ids, ordered.masked_fill_(~keep, float("-inf")))
