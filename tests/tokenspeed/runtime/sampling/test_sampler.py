from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.runtime.sampling.batch import SamplingBatch, SamplingRow
from tokenspeed.runtime.sampling.sampler import Sampler
from tokenspeed_kernel.ops.sampling.noise import gumbel_noise
from tokenspeed_kernel.ops.sampling.reference import keep_likely

CPU = torch.device("cpu")
INF = float("inf")


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=1, **fields)


def sample(
    logits: Tensor, rows: list[SamplingParams], positions: list[int], forbidden: Sequence[Sequence[int]] = ()
) -> list[int]:
    columns = zip(rows, positions, forbidden or [()] * len(rows), strict=True)
    picked = Sampler()(logits, SamplingBatch.build([SamplingRow(*row) for row in columns], CPU))
    assert picked.dtype == torch.int64
    return picked.tolist()


def draws(logits: list[float], count: int, **fields: Any) -> Counter[int]:
    """How often each id is drawn over `count` positions."""
    rows = torch.tensor([logits]).expand(count, -1)
    return Counter(sample(rows, [params(**fields)] * count, list(range(count))))


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0], [5.0, 5.0, 0.0, 5.0]])
    assert sample(logits, [params(temperature=0.0)] * 2, [0, 0]) == [1, 0]
    assert sample(logits, [params(temperature=0.0), params(temperature=1e-4)], [0, 0])[0] == 1


def test_frequencies_follow_the_probabilities_at_a_temperature() -> None:
    logits, count = [0.0, 1.0, 2.0, -1.0], 20000
    for temperature in (0.5, 1.0, 2.0):
        seen = draws(logits, count, temperature=temperature, seed=7)
        want = (torch.tensor(logits) / temperature).softmax(0) * count
        chi2 = sum((seen[i] - want[i].item()) ** 2 / want[i].item() for i in range(4))
        assert chi2 < 16.27  # 3 degrees of freedom, one in a thousand


def test_other_seeds_and_other_positions_give_other_draws() -> None:
    logits = torch.zeros(1, 50000)
    base = sample(logits, [params(seed=1)], [0])
    assert sample(logits, [params(seed=1)], [0]) == base
    assert sample(logits, [params(seed=2)], [0]) != base
    assert sample(logits, [params(seed=1)], [1]) != base
    assert sample(logits, [params(seed=1 + 2**64)], [0]) == base
    assert sample(logits, [params(seed=2**64 - 1)], [0]) == sample(logits, [params(seed=-1)], [0])


def test_a_swap_of_seed_and_position_is_another_draw() -> None:
    noise = gumbel_noise(torch.tensor([3, 4]), torch.tensor([4, 3]), 100)
    assert not torch.equal(noise[0], noise[1])


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_row_does_not_depend_on_its_batch(data: st.DataObject) -> None:
    one_row = st.builds(
        params,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        top_k=st.sampled_from([0, 1, 5, 1000]),
        top_p=st.sampled_from([1.0, 0.9, 0.2]),
        seed=st.integers(0, 2**64),
    )
    rows = data.draw(st.lists(one_row, min_size=1, max_size=6))
    logits = torch.randn(len(rows), 97, generator=torch.Generator().manual_seed(len(rows)))
    positions = list(range(3, 3 + len(rows)))
    together = sample(logits, rows, positions)
    alone = [sample(logits[i : i + 1], [rows[i]], positions[i : i + 1])[0] for i in range(len(rows))]
    assert together == alone


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 999),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([0.01, 0.3, 0.8, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_what_stays_is_what_the_warpers_of_transformers_leave(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(3, 33, generator=torch.Generator().manual_seed(seed))
    want = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        want = TopKLogitsWarper(top_k)(None, want)
    if top_p < 1:
        want = TopPLogitsWarper(top_p)(None, want)
    want = MinPLogitsWarper(min_p)(None, want)
    columns = torch.full((3,), top_k), torch.full((3,), top_p), torch.full((3,), min_p)
    got = keep_likely(logits / temperature, *columns)
    torch.testing.assert_close(got, want)


def test_top_k_and_top_p_bound_what_is_drawn() -> None:
    logits = [3.0, 2.0, 1.0, 0.0, -1.0]
    assert set(draws(logits, 500, top_k=2)) == {0, 1}
    assert set(draws(logits, 500, top_k=1, temperature=5.0)) == {0}
    assert set(draws(logits, 2000, top_p=0.8)) == {0, 1}
    assert set(draws(logits, 500, top_p=1e-9)) == {0}
    assert set(draws(logits, 20000)) == {0, 1, 2, 3, 4}


def test_mixed_rows_each_follow_their_own_parameters() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.9]]).expand(300, -1)
    rows = [params(temperature=0.0), params(top_k=2), params()] * 100
    picked = sample(logits, rows, list(range(300)))
    assert set(picked[0::3]) == {1}
    assert set(picked[1::3]) == {1, 2}
    assert set(picked[2::3]) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_ids_are_never_chosen_and_the_logits_stay(temperature: float) -> None:
    logits = torch.tensor([[9.0, 8.0, 0.0], [9.0, 0.0, 8.0]])
    before = logits.clone()
    for position in range(50):
        picked = sample(logits, [params(temperature=temperature)] * 2, [position] * 2, [(0, 2), (0,)])
        assert picked[0] == 1
        assert picked[1] != 0
    assert torch.equal(logits, before)


def test_a_single_candidate_is_chosen_whatever_the_noise() -> None:
    logits = torch.full((4000, 3), -INF)
    logits[:, 2] = -50.0
    assert set(sample(logits, [params()] * 4000, list(range(4000)))) == {2}


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(torch.arange(20), torch.full((20,), 5), 10000).double()
    assert noise.isfinite().all()
    assert abs(noise.mean().item() - 0.5772) < 0.01
    assert abs(noise.var().item() - torch.pi**2 / 6) < 0.03
    # The largest of n is about log(n): the upper tail, which wins, is not cut.
    assert noise.max().item() > 10
    along_ids = torch.corrcoef(torch.stack((noise[:, 1:].flatten(), noise[:, :-1].flatten())))[0, 1]
    along_seeds = torch.corrcoef(torch.stack((noise[1:].flatten(), noise[:-1].flatten())))[0, 1]
    assert max(abs(along_ids.item()), abs(along_seeds.item())) < 0.01


def test_build_makes_only_the_edits_of_logits_that_are_asked_for() -> None:
    def flags(*rows: SamplingRow) -> tuple[bool, bool]:
        batch = SamplingBatch.build(rows, CPU)
        edits = (batch.bias, batch.penalties, batch.mask, batch.logprobs)
        return batch.greedy, any(edit is not None for edit in edits)

    plain = SamplingRow(params(top_k=3, top_p=0.5, min_p=0.1), 5)
    greedy = SamplingRow(params(temperature=0.0, top_k=5), 5)
    assert flags(greedy, greedy) == (True, False)
    assert flags(plain, greedy) == (False, False)
    for fields in (
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((1, 1.0),)},
        {"logprobs": 0},
    ):
        assert flags(plain, SamplingRow(params(**fields), 5)) == (False, True)
    assert flags(greedy, SamplingRow(params(temperature=0.0), 5, (1,))) == (True, True)
