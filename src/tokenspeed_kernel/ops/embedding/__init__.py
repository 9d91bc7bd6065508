"""Lookup of token embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.ops.embedding import reference
from tokenspeed_kernel.registry import Kernel, select
from tokenspeed_kernel.triton_language import AVAILABLE

if AVAILABLE:
    from tokenspeed_kernel.ops.embedding import triton as _triton  # noqa: F401

__all__ = ["embedding", "plan_embedding", "reference"]


def plan_embedding(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel that `embedding` is to use."""
    return select("embedding", "embedding", device, dtype)


def embedding(ids: Tensor, table: Tensor, first_id: int = 0, *, kernel: Kernel | None = None) -> Tensor:
    """Rows of a table that holds the embeddings of `first_id`, `first_id + 1`, ...

    Args:
        ids: int64 [tokens].
        table: [rows, size].
        first_id: id of the table's first row.
        kernel: from `plan_embedding`; chosen for `table` if it is not given.

    Returns:
        [tokens, size] of the table's dtype; zeros for an id that the table does not hold.
    """
    kernel = kernel or plan_embedding(table.device, table.dtype)
    out: Tensor = kernel(ids, table, first_id)
    return out
