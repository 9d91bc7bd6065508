from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.runtime.sampling.batch import SamplingBatch, SamplingRow
from tokenspeed.runtime.sampling.logprobs import token_logprobs
from tokenspeed.runtime.sampling.sampler import Sampler

CPU = torch.device("cpu")


@settings(deadline=None)
@given(rows=st.integers(1, 4), vocab=st.integers(1, 20), seed=st.integers(0, 99), data=st.data())
def test_they_are_the_log_softmax_likeliest_first(rows: int, vocab: int, seed: int, data: st.DataObject) -> None:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4
    chosen = data.draw(st.lists(st.integers(0, vocab - 1), min_size=rows, max_size=rows))
    tops = data.draw(st.lists(st.integers(0, vocab), min_size=rows, max_size=rows))
    want = logits.double().log_softmax(dim=-1)
    found = token_logprobs(logits, torch.tensor(chosen), max(tops)).tolist(tops)
    for row, (token_id, top, entry) in enumerate(zip(chosen, tops, found, strict=True)):
        assert abs(entry.logprob - want[row, token_id].item()) < 1e-5
        best = sorted(range(vocab), key=lambda i: -logits[row, i].item())[:top]
        assert entry.top_ids == best
        assert all(abs(value - want[row, i].item()) < 1e-5 for value, i in zip(entry.top_logprobs, best, strict=True))


def test_they_are_the_model_s_own_before_bias_penalties_and_temperature() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.0, 1.0, 2.0], [3.0, 1.0, 0.0]])
    plain = SamplingParams(max_new_tokens=1, temperature=0.0)
    edited = SamplingParams(
        max_new_tokens=1, temperature=0.0, presence_penalty=2.0, logit_bias=((0, 90.0),), logprobs=2
    )
    rows = [SamplingRow(edited, 4, (), (1,), (1,)), SamplingRow(plain, 4), SamplingRow(edited, 4, (), (), (0,))]
    batch = SamplingBatch.build(rows, CPU)
    assert batch.logprobs is not None
    ids = Sampler()(logits, batch)
    assert ids.tolist() == [0, 2, 0]
    found = Sampler().logprobs(logits, ids, batch.logprobs).tolist(batch.logprobs.tops)
    want = logits.log_softmax(dim=-1)
    assert batch.logprobs.rows == [0, 2]
    for entry, row in zip(found, (0, 2), strict=True):
        assert abs(entry.logprob - want[row, 0].item()) < 1e-5
    assert found[0].top_ids == [1, 0]
