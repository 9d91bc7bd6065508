"""Lookup of token embeddings in plain torch."""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel.registry import register_kernel


@register_kernel("embedding", "embedding", solution="reference")
def embedding(ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    rows = ids - first_id
    absent = (rows < 0) | (rows >= table.shape[0])
    return table.index_select(0, rows.masked_fill(absent, 0)).masked_fill(absent.unsqueeze(1), 0)
