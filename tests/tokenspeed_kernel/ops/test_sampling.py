"""Sampling against a row by row definition in float64, with the same noise."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.tokenspeed_kernel.ops.solutions import DEVICE, each, few
from tokenspeed_kernel.ops.sampling import sample
from tokenspeed_kernel.ops.sampling.noise import gumbel_noise
from tokenspeed_kernel.ops.sampling.reference import keep_likely
from tokenspeed_kernel.registry import Kernel

SLACK = 1e-5
"""What rounding may move a cumulated probability by."""


def tensors(rows: list[dict[str, Any]]) -> tuple[Tensor, ...]:
    kinds = {"temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}
    kinds |= {"seeds": torch.int64, "positions": torch.int64}
    return tuple(torch.tensor([row[name] for row in rows], dtype=kind, device=DEVICE) for name, kind in kinds.items())


def candidates(logits: Tensor, row: dict[str, Any], slack: float) -> set[int]:
    """Ids that the row may draw, where cumulated probabilities may be off by `slack`."""
    scores = (logits.float() / row["temperature"]).double()
    order = sorted(range(len(scores)), key=lambda i: (-scores[i].item(), i))
    if row["top_k"]:
        least = scores[order[min(row["top_k"], len(order)) - 1]]
        order = [i for i in order if scores[i] >= least]
    probabilities = scores[order].softmax(0)
    before = probabilities.cumsum(0) - probabilities
    kept = {order[0]}
    for place, token in enumerate(order):
        top_p = row["top_p"] >= 1 or before[place] < row["top_p"] + slack
        min_p = probabilities[place] >= row["min_p"] * probabilities[0] * (1 - slack)
        if top_p and min_p and scores[token] > -torch.inf:
            kept.add(token)
    return kept


one_row = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 5, 40, 1000]),
        "top_p": st.sampled_from([1.0, 0.9, 0.5, 0.01]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        "seeds": st.integers(-(2**63), 2**63 - 1),
        "positions": st.integers(0, 2**20),
    }
)


@each("sampling", "sample")
@few(40)
@given(
    rows=st.lists(one_row, min_size=1, max_size=5),
    vocab=st.one_of(st.integers(1, 90), st.just(2100)),
    seed=st.integers(0, 999),
)
def test_the_best_candidate_under_the_noise_is_taken(
    kernel: Kernel, rows: list[dict[str, Any]], vocab: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Steps of a quarter make equal logits frequent.
    logits = (torch.randn(len(rows), vocab, generator=generator) * 8).round() / 4
    logits[torch.rand(len(rows), vocab, generator=generator) < 0.1] = -torch.inf
    on_device = logits.to(DEVICE)
    picked = sample(on_device, *tensors(rows), kernel=kernel)
    assert picked.dtype == torch.int64
    assert torch.equal(on_device.cpu(), logits)
    for index, row in enumerate(rows):
        token = picked[index].item()
        if row["temperature"] == 0:
            assert token == logits[index].argmax()
            continue
        noise = gumbel_noise(torch.tensor([row["seeds"]]), torch.tensor([row["positions"]]), vocab)[0]
        noisy = logits[index] / row["temperature"] + noise
        assert token in candidates(logits[index], row, SLACK)
        sure = candidates(logits[index], row, -SLACK)
        assert noisy[token] >= max(noisy[i] for i in sure) - SLACK


def test_min_p_keeps_what_the_warper_of_transformers_leaves() -> None:
    from transformers import MinPLogitsWarper

    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    for min_p in (0.01, 0.3, 1.0):
        off = torch.zeros(4, dtype=torch.int64), torch.ones(4)
        got = keep_likely(scores, *off, torch.full((4,), min_p))
        torch.testing.assert_close(got, MinPLogitsWarper(min_p)(None, scores))


@each("sampling", "sample")
def test_rows_may_be_strided_and_none_is_no_error(kernel: Kernel) -> None:
    wide = torch.randn(6, 40, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    rows = [{"temperature": 1.0, "top_k": 0, "top_p": 0.9, "min_p": 0.0, "seeds": 3, "positions": i} for i in range(3)]
    logits = wide[::2, :30]
    dense = sample(logits.contiguous(), *tensors(rows), kernel=kernel)
    assert torch.equal(sample(logits, *tensors(rows), kernel=kernel), dense)
    assert sample(wide[:0], *tensors([]), kernel=kernel).shape == (0,)


@each("sampling", "sample")
def test_logits_that_are_no_numbers_give_some_id(kernel: Kernel) -> None:
    """A model that overflows must not make an id that no embedding has, nor a loop without end."""
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[nan] * 3, [-inf] * 3, [0.0, inf, inf], [nan, 1.0, -inf], [-inf, -inf, 3.0]], device=DEVICE)
    for filters in ({"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1}):
        for temperature in (0.0, 1.0):
            row = {"temperature": temperature, "seeds": 5, "positions": 9, **filters}
            picked = sample(logits, *tensors([row] * 5), kernel=kernel).tolist()
            assert all(0 <= token < 3 for token in picked)
            assert picked[4] == 2
