"""Lookup of token embeddings in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.registry import register_kernel
from tokenspeed_kernel.rounding import cdiv
from tokenspeed_kernel.triton_language import TRITON, tl, triton
from tokenspeed_kernel.triton_run import run_triton

BLOCK = 1024


@register_kernel("embedding", "embedding", **TRITON)
def embedding(ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    table = table if table.stride(1) == 1 else table.contiguous()
    tokens, (rows, size) = ids.shape[0], table.shape
    out = torch.empty(tokens, size, dtype=table.dtype, device=table.device)
    if out.numel():
        grid = (tokens, cdiv(size, BLOCK))
        run_triton(
            embedding_kernel,
            grid,
            ids,
            table,
            out,
            ids.stride(0),
            table.stride(0),
            first_id,
            rows,
            size,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out


@triton.jit
def embedding_kernel(ids, table, out, ids_stride, table_stride, first_id, rows, size, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token * ids_stride) - first_id
    held = (row >= 0) & (row < rows)
    inside = column < size
    value = tl.load(table + row * table_stride + column, mask=inside & held, other=0.0)
    tl.store(out + token * size + column, value, mask=inside)
