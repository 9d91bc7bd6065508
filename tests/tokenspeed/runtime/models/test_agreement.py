"""Logits against transformers, over every way in which the scheduler may cut and mix sequences."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel.launch import recording

SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "head_dim": {"head_dim": 20},
    "odd": {"vocab_size": 131, "hidden_size": 30, "intermediate_size": 22, "num_attention_heads": 3,
            "num_key_value_heads": 3, "head_dim": 10},
    "llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 50.0, "factor": 8.0,
                                   "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                   "original_max_position_embeddings": 32}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3 tied": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3 with biases": {"model_type": "qwen3", "head_dim": 12, "attention_bias": True, "num_key_value_heads": 4},
}  # fmt: skip


def ids(seed: int, count: int) -> list[int]:
    return torch.randint(0, 67, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0, -1]


def check(model: Any, got: Tensor, *sequences: list[int]) -> None:
    want = torch.stack([expected(model, tokens) for tokens in sequences])
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_chunks_mixed_and_decode_agree_with_transformers(make_pair: Any, make_row: Any, shape: str) -> None:
    theirs, runner = make_pair(**SHAPES[shape])
    a, b = ids(1, 40), ids(2, 21)
    table_a, table_b = list(range(10, 22)), list(range(40, 28, -1))
    check(theirs, runner.step([make_row(a[:17], 0, table_a)]), a[:17])
    check(theirs, runner.step([make_row(a[17:30], 17, table_a)]), a[:30])
    mixed = [make_row(a[30:31], 30, table_a), make_row(b[:19], 0, table_b)]
    check(theirs, runner.step(mixed), a[:31], b[:19])
    for step in range(2):
        end_a, end_b = 32 + step, 20 + step
        rows = [
            make_row(a[end_a - 1 : end_a], end_a - 1, table_a),
            make_row(b[end_b - 1 : end_b], end_b - 1, table_b),
        ]
        check(theirs, runner.step(rows), a[:end_a], b[:end_b])


def test_a_prefix_computed_for_one_sequence_serves_another(make_pair: Any, make_row: Any) -> None:
    theirs, runner = make_pair()
    shared, a, b = ids(1, 16), ids(2, 5), ids(3, 9)
    runner.step([make_row(shared + a, 0, range(1, 9))])
    table_b = [1, 2, 3, 4, 20, 21, 22]
    check(theirs, runner.step([make_row(b, 16, table_b)]), shared + b)
    rows = [make_row([5], 21, range(1, 9)), make_row([6], 25, table_b)]
    check(theirs, runner.step(rows), [*shared, *a, 5], [*shared, *b, 6])


def test_a_preempted_sequence_is_recomputed_in_other_blocks(make_pair: Any, make_row: Any) -> None:
    theirs, runner = make_pair()
    tokens = ids(4, 23)
    runner.step([make_row(tokens[:20], 0, range(1, 9))])
    for end in (21, 22):
        runner.step([make_row(tokens[end - 1 : end], end - 1, range(1, 9))])
    check(theirs, runner.step([make_row(tokens[:22], 0, range(30, 38))]), tokens[:22])
    check(theirs, runner.step([make_row(tokens[22:], 22, range(30, 38))]), tokens)


def test_padding_changes_nothing(make_pair: Any, make_row: Any) -> None:
    theirs, runner = make_pair()
    a, b = ids(5, 14), ids(6, 9)
    prefill = [make_row(a[:13], 0, range(1, 5)), make_row(b[:8], 0, range(5, 9))]
    check(theirs, runner.step(prefill, pad_tokens=11, pad_rows=2, pad_width=3), a[:13], b[:8])
    decode = [make_row(a[13:], 13, range(1, 5)), make_row(b[8:], 8, range(5, 9))]
    check(theirs, runner.step(decode, pad_rows=2, pad_width=5), a, b)


def test_plan_may_run_again(make_pair: Any, make_row: Any) -> None:
    theirs, runner = make_pair(**SHAPES["llama3"])
    runner.model.plan(torch.device("cpu"), torch.float32)
    tokens = ids(7, 12)
    check(theirs, runner.step([make_row(tokens, 0, range(1, 9))]), tokens)


def test_every_product_and_attention_is_a_launch(make_pair: Any, make_row: Any) -> None:
    seen: Counter[str] = Counter()

    class Count:
        def launch(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
            seen[name.rpartition(".")[0]] += 1
            return function(*args, **kwargs)

    _, runner = make_pair()
    with recording(Count()):
        runner.step([make_row([1, 2, 3], 0, [1])])
        runner.step([make_row([4], 3, [1])])
    assert seen == {
        "embedding.embedding": 2,
        "norm.add_rms_norm": 10,
        "gemm.linear": 18,
        "rope.rope_and_write_kv": 4,
        "attention.extend": 2,
        "attention.decode": 2,
        "activation.silu_and_mul": 4,
    }
