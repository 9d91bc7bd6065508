"""Tiny random models, and a runner that steps them over a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hf_models import hf_model
from tokenspeed.runtime.distributed.group import Group
from tokenspeed.runtime.layers.context import ForwardContext
from tokenspeed.runtime.models.base import CausalLM
from tokenspeed.runtime.models.config import ModelConfig
from tokenspeed.runtime.models.registry import build_model

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """`ids` are computed at positions `start` and on, into the blocks of `table`."""

    ids: Sequence[int]
    start: int
    table: Sequence[int]


class Runner:
    """One rank's model with its KV pools; every pool starts as NaN outside the scratch block's slots."""

    def __init__(self, model: CausalLM, ranks: int = 1, block_size: int = 4, num_blocks: int = 64) -> None:
        self.model = model
        self.block_size = block_size
        config = model.config
        shape = (num_blocks, block_size, config.local_kv_heads(ranks), config.head_dim)
        self.kv = [(torch.full(shape, float("nan")), torch.full(shape, float("nan"))) for _ in range(config.num_layers)]
        for pools in self.kv:
            for pool in pools:
                pool[0] = 0

    def step(self, rows: Sequence[Row], pad_tokens: int = 0, pad_rows: int = 0, pad_width: int = 0) -> Tensor:
        """Logits of the last token of each row."""
        decode = all(len(row.ids) == 1 for row in rows) and pad_tokens == 0
        lengths = [len(row.ids) for row in rows]
        positions = [row.start + i for row in rows for i in range(len(row.ids))]
        slots = [
            row.table[p // self.block_size] * self.block_size + p % self.block_size
            for row in rows
            for p in range(row.start, row.start + len(row.ids))
        ]
        padding = [0] * (pad_rows if decode else pad_tokens)
        seq_lens = [row.start + len(row.ids) for row in rows] + [0] * pad_rows
        width = max(-(-length // self.block_size) for length in seq_lens) + pad_width
        tables = torch.zeros(len(rows) + pad_rows, width, dtype=torch.int32)
        for i, row in enumerate(rows):
            used = list(row.table)[:width]
            tables[i, : len(used)] = torch.tensor(used, dtype=torch.int32)
        starts = torch.tensor([0, *lengths, *([1 if decode else 0] * pad_rows)]).cumsum(0)
        ctx = ForwardContext(
            kv=self.kv,
            slot_mapping=torch.tensor(slots + padding),
            block_tables=tables,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            query_start=starts.to(torch.int32),
            max_query_len=1 if decode else max(*lengths, pad_tokens),
            logits_rows=starts[1:] - 1,
        )
        ids = torch.tensor([i for row in rows for i in row.ids] + padding)
        with torch.inference_mode():
            hidden = self.model(ids, torch.tensor(positions + padding), ctx)
            return self.model.compute_logits(hidden[ctx.logits_rows[: len(rows)]])


def load(config: ModelConfig, weights: dict[str, Tensor], group: Any = None) -> CausalLM:
    model = build_model(config, group or Group.solo())
    model.materialize(CPU, torch.float32)
    model.load_weights(weights.items())
    model.plan(CPU, torch.float32)
    return model


@pytest.fixture
def make_pair() -> Callable[..., tuple[Any, Runner]]:
    """`make_pair(**config changes)` gives (the model of transformers, a runner of ours with its weights)."""

    def make(**changes: Any) -> tuple[Any, Runner]:
        theirs = hf_model(**changes)
        return theirs, Runner(load(ModelConfig.from_hf(theirs.config.to_dict()), theirs.state_dict()))

    return make


@pytest.fixture
def make_ranks() -> Callable[..., tuple[Runner, list[Runner]]]:
    """`make_ranks(groups, **config changes)` gives (the runner of one rank, a runner for each group)."""

    def make(groups: Sequence[Any], **changes: Any) -> tuple[Runner, list[Runner]]:
        theirs = hf_model(**changes)
        config = ModelConfig.from_hf(theirs.config.to_dict())
        ranks = [Runner(load(config, theirs.state_dict(), group), group.size) for group in groups]
        return Runner(load(config, theirs.state_dict())), ranks

    return make


@pytest.fixture
def make_row() -> type[Row]:
    return Row


@pytest.fixture
def make_runner() -> Callable[..., Runner]:
    """`make_runner(model)` steps a model that is loaded and planned."""
    return Runner
