"""Bias and penalties against the definitions written out token by token, and against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.runtime.sampling.batch import SamplingBatch, SamplingRow
from tokenspeed.runtime.sampling.edits import LogitBias, Penalties, TokenMask
from tokenspeed.runtime.sampling.sampler import Sampler

CPU = torch.device("cpu")
VOCAB = 12
INF = float("inf")

ids = st.integers(0, VOCAB - 1)
rows = st.builds(
    SamplingRow,
    params=st.builds(
        SamplingParams,
        max_new_tokens=st.just(1),
        temperature=st.sampled_from([0.0, 0.7, 1.0]),
        presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
        frequency_penalty=st.sampled_from([0.0, 0.25, 2.0]),
        repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
        logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -0.5, 3.0]), max_size=4).map(
            lambda bias: tuple(bias.items())
        ),
        seed=st.integers(0, 9),
    ),
    position=st.integers(0, 50),
    forbidden=st.lists(ids, max_size=3, unique=True).map(tuple),
    prompt_ids=st.lists(ids, max_size=6, unique=True),
    answer_ids=st.lists(ids, max_size=20),
)


def logits_for(count: int, seed: int) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def by_hand(logits: list[float], row: SamplingRow) -> list[float]:
    """The logits that a token is chosen from, one by one."""
    params, edited = row.params, []
    for token_id, logit in enumerate(logits):
        logit += dict(params.logit_bias).get(token_id, 0.0)
        count = list(row.answer_ids).count(token_id)
        if count or token_id in row.prompt_ids:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * count
        if count:
            logit -= params.presence_penalty
        edited.append(-INF if token_id in row.forbidden else logit)
    return edited


def edit(logits: Tensor, batch: SamplingBatch) -> Tensor:
    for step in (batch.bias, batch.penalties):
        logits = step.apply(logits) if step is not None else logits
    return logits


@settings(max_examples=80, deadline=None)
@given(batch=st.lists(rows, min_size=1, max_size=5), seed=st.integers(0, 99))
def test_edits_are_the_definitions_and_leave_the_logits_as_they_are(batch: list[SamplingRow], seed: int) -> None:
    logits = logits_for(len(batch), seed)
    before = logits.clone()
    edited = edit(logits, SamplingBatch.build(batch, CPU))
    want = torch.tensor([by_hand(row, spec) for row, spec in zip(before.tolist(), batch, strict=True)])
    torch.testing.assert_close(edited, want)
    assert torch.equal(logits, before)


@settings(max_examples=50, deadline=None)
@given(batch=st.lists(rows, min_size=1, max_size=5), seed=st.integers(0, 99))
def test_a_row_s_token_does_not_depend_on_the_other_rows(batch: list[SamplingRow], seed: int) -> None:
    logits = logits_for(len(batch), seed)
    together = Sampler()(logits, SamplingBatch.build(batch, CPU)).tolist()
    alone = [Sampler()(logits[i : i + 1], SamplingBatch.build([row], CPU)).item() for i, row in enumerate(batch)]
    assert together == alone


@settings(deadline=None)
@given(
    penalty=st.sampled_from([0.5, 1.2, 2.0]),
    prompt=st.lists(ids, min_size=1, max_size=8),
    answer=st.lists(ids, max_size=8),
    seed=st.integers(0, 99),
)
def test_the_repetition_penalty_is_that_of_transformers(
    penalty: float, prompt: list[int], answer: list[int], seed: int
) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = logits_for(1, seed)
    want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + answer]), logits.clone())
    params = SamplingParams(max_new_tokens=1, repetition_penalty=penalty)
    penalties = Penalties.build([(params, list(dict.fromkeys(prompt)), answer)], CPU)
    assert penalties is not None
    torch.testing.assert_close(penalties.apply(logits), want)


@settings(deadline=None)
@given(bias=st.dictionaries(ids, st.floats(-100, 100, width=32), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_the_bias_is_that_of_transformers(bias: dict[int, float], seed: int) -> None:
    from transformers import SequenceBiasLogitsProcessor

    logits = logits_for(1, seed)
    sequences: Any = [[[token_id], value] for token_id, value in bias.items()]
    want = SequenceBiasLogitsProcessor(sequences)(torch.tensor([[0]]), logits.clone())
    added = LogitBias.build([(tuple(bias.items()), ())], CPU)
    assert added is not None
    torch.testing.assert_close(added.apply(logits), want)


def test_nothing_is_built_where_nothing_is_asked_for() -> None:
    plain = SamplingRow(SamplingParams(max_new_tokens=1), 3, (), (1, 2), (3, 4))
    batch = SamplingBatch.build([plain, plain], CPU)
    assert (batch.bias, batch.penalties, batch.logprobs) == (None, None, None)


def test_penalties_keep_a_greedy_answer_from_repeating_itself() -> None:
    logits = torch.tensor([[3.0, 2.5, 2.0, -5.0]])
    params = SamplingParams(max_new_tokens=1, temperature=0.0, frequency_penalty=0.4)
    answer: list[int] = []
    for position in range(6):
        row = SamplingRow(params, position, (), (), answer)
        answer.append(int(Sampler()(logits, SamplingBatch.build([row], CPU)).item()))
    # 3.0, 2.6 and 2.2 against 2.5, then 2.1 against 2.0, and so on.
    assert answer == [0, 0, 1, 0, 1, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_in_which_everything_is_forbidden_still_gets_a_token(temperature: float) -> None:
    params = SamplingParams(max_new_tokens=1, temperature=temperature, top_p=0.9)
    row = SamplingRow(params, 0, tuple(range(VOCAB)))
    other = SamplingRow(params, 0)
    picked = Sampler()(logits_for(2, 0), SamplingBatch.build([row, other], CPU)).tolist()
    assert all(0 <= token_id < VOCAB for token_id in picked)


@settings(deadline=None)
@given(st.lists(st.none() | st.sets(st.integers(0, 69), min_size=1), min_size=1, max_size=4))
def test_a_mask_leaves_what_it_allows_and_other_rows_alone(masks: list[set[int] | None]) -> None:
    def words(allowed: set[int]) -> Any:
        bits = sum(1 << token for token in allowed)
        return np.array([bits >> 32 * word & 0xFFFFFFFF for word in range(3)], dtype=np.uint32).view(np.int32)

    logits = torch.randn(len(masks), 70)
    before = logits.clone()
    mask = TokenMask.build([None if allowed is None else words(allowed) for allowed in masks], CPU)
    masked = logits if mask is None else mask.apply(logits)
    for row, allowed in enumerate(masks):
        for token in range(70):
            may = allowed is None or token in allowed
            assert masked[row, token] == (before[row, token] if may else -INF)
    assert torch.equal(logits, before)
