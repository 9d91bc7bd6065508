"""Models spread over ranks that are threads of this process, against the same model on one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.waiting import PATIENCE
from tokenspeed.errors import ConfigError


class Meeting:
    """Where the threads of a group exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.tensors: list[Tensor | None] = [None] * size

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.tensors[rank] = tensor.clone()
        self.barrier.wait()
        everyone = [t for t in self.tensors if t is not None]
        self.barrier.wait()
        return everyone


class ThreadGroup:
    """One rank of a group of threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self.meeting.exchange(self.rank, tensor)).sum(0))

    def all_gather_last(self, tensor: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, tensor), dim=-1)


SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "vocab that does not divide": {"vocab_size": 69, "tie_word_embeddings": True},
    "vocab smaller than its padding": {"vocab_size": 9},
    "one kv head": {"num_key_value_heads": 1},
    "mha": {"num_key_value_heads": 4, "head_dim": 6},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_together_compute_what_one_computes(
    make_ranks: Callable[..., Any], make_row: Any, shape: str, ranks: int
) -> None:
    meeting = Meeting(ranks)
    groups = [ThreadGroup(meeting, rank) for rank in range(ranks)]
    solo, runners = make_ranks(groups, **SHAPES[shape])
    a = [3, 1, 4, 1, 5, 7, 2, 6, 5, 3, 5]
    steps = [
        [make_row(a[:7], 0, [1, 2, 3])],
        [make_row(a[7:9], 7, [1, 2, 3]), make_row(a[:6], 0, [7, 5])],
        [make_row(a[9:10], 9, [1, 2, 3]), make_row(a[6:7], 6, [7, 5])],
    ]
    with ThreadPoolExecutor(ranks) as pool:
        for rows in steps:
            want = solo.step(rows)
            results = list(pool.map(lambda runner, rows=rows: runner.step(rows), runners))
            for got in results:
                assert torch.equal(got, results[0])
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_number_of_ranks_that_does_not_fit_is_refused(make_ranks: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"does not fit 4 attention heads, .* use one of: 1, 2, 4$"):
        make_ranks([ThreadGroup(Meeting(3), 0)])
