"""The table of token embeddings, whose rows are spread over the ranks; also the output head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokenspeed.runtime.layers.base import Layer, WeightSlot, empty_parameter
from tokenspeed_kernel.ops.embedding import embedding, plan_embedding
from tokenspeed_kernel.ops.gemm import linear, plan_linear

if TYPE_CHECKING:
    from tokenspeed.runtime.distributed.group import Group


class VocabParallelEmbedding(Layer):
    """Embeds token ids, or scores hidden states against every token.

    Each rank holds equally many rows; where the vocabulary does not divide, the last ranks have spare ones.
    """

    def __init__(self, vocab_size: int, hidden_size: int, group: Group) -> None:
        super().__init__()
        rows = -(-vocab_size // group.size)
        self.weight = empty_parameter(rows, hidden_size)
        self.vocab_size = vocab_size
        self.first_id = group.rank * rows
        self.group = group

    def plan(self, device: torch.device, dtype: torch.dtype) -> None:
        self.kernel = plan_embedding(device, dtype)
        self.linear_kernel = plan_linear(device, dtype)

    def slots(self) -> Iterator[WeightSlot]:
        rows, hidden_size = self.weight.shape
        start = min(self.first_id, self.vocab_size)
        held = min(rows, self.vocab_size - start)
        yield WeightSlot("", "weight", (self.vocab_size, hidden_size), 0, start, held)

    def process(self) -> None:
        # The spare rows are multiplied and then cut off: any finite numbers would do.
        self.weight[max(0, self.vocab_size - self.first_id) :].zero_()

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [tokens] to [tokens, hidden_size], the same on all ranks."""
        return self.group.all_reduce(embedding(ids, self.weight, self.first_id, kernel=self.kernel))

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] to [rows, vocab_size] of the same dtype, the same on all ranks."""
        local = linear(hidden, self.weight, kernel=self.linear_kernel)
        return self.group.all_gather_last(local)[:, : self.vocab_size]
