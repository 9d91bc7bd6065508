"""Choosing one token a row from logits: greedy, or temperature, then top-k, then top-p, then min-p, then a draw.

The order is that of `transformers`. The draw is fixed by seed and position: Gumbel-max with the noise of `noise`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.ops.sampling import cpu, noise, reference
from tokenspeed_kernel.registry import Kernel, select
from tokenspeed_kernel.triton_language import AVAILABLE

if AVAILABLE:
    from tokenspeed_kernel.ops.sampling import triton as _triton  # noqa: F401

__all__ = ["cpu", "noise", "plan_sample", "reference", "sample"]


def plan_sample(device: torch.device) -> Kernel:
    """The kernel that `sample` is to use."""
    return select("sampling", "sample", device, torch.float32)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    kernel: Kernel | None = None,
) -> Tensor:
    """One token id a row; no row depends on another, and nothing is read on the host.

    Args:
        logits: float32 [rows, vocab_size], rows may be strided; not written. -inf excludes a token.
        temperature: float32 [rows]; 0 takes the most likely token, and of equal ones the lowest id.
        top_k: int64 [rows]; keeps the k highest logits and what equals the k-th; 0 is off.
        top_p: float32 [rows]; keeps, of what top-k left, the most likely tokens until their probabilities reach
            top_p; of equal logits the lower id comes first; 1 is off.
        min_p: float32 [rows]; keeps tokens with at least min_p times the probability of the likeliest; 0 is off.
        seeds: int64 [rows].
        positions: int64 [rows]: index in its sequence of the token to be sampled.
        kernel: from `plan_sample`; chosen for `logits` if it is not given.

    Returns:
        int64 [rows].
    """
    kernel = kernel or plan_sample(logits.device)
    out: Tensor = kernel(logits, temperature, top_k, top_p, min_p, seeds, positions)
    return out
