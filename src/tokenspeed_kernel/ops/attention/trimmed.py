"""Attention on a CPU: what is padding is cut off first, since the host can read the lengths for nothing.

A captured step pads the batch to its bucket and the block tables to the longest sequence there may be. A GPU
kernel reads the lengths and leaves early; plain torch would compute the padding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tokenspeed_kernel.ops.attention import reference
from tokenspeed_kernel.registry import register_kernel

FEW_SEQS = 8
"""Up to so many sequences decode one by one: that spares the masks, and all that makes the slots of a batch."""

TILE_ROWS = 256
"""Rows of one sequence that are computed at once: early ones need not look at late positions."""


@register_kernel("attention", "decode", solution="trimmed", priority=4, devices=("cpu",))
def decode(
    query: Tensor, key_pool: Tensor, value_pool: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    lengths = seq_lens.tolist()
    if len(lengths) > FEW_SEQS:
        tables = block_tables[:, : _width(max(lengths), key_pool)]
        return reference.decode(query, key_pool, value_pool, tables, seq_lens, scale)
    out = torch.zeros_like(query)
    for row, length in enumerate(lengths):
        if length:
            table = block_tables[row, : _width(length, key_pool)]
            # Only what the sequence has written: a slot that nobody has may hold anything.
            keys, values = (
                pool.index_select(0, table).flatten(0, 1)[:length].transpose(0, 1) for pool in (key_pool, value_pool)
            )
            out[row] = scaled_dot_product_attention(
                query[row].unsqueeze(1)[None], keys[None], values[None], scale=scale, enable_gqa=True
            ).view_as(query[row])
    return out


@register_kernel("attention", "extend", solution="trimmed", priority=4, devices=("cpu",))
def extend(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    max_query_len: int,
    scale: float,
) -> Tensor:
    """Sequences of one new token go together, each other one by itself; padding tokens get zeros."""
    out = torch.zeros_like(query)
    lengths, starts, counts = seq_lens.tolist(), query_start.tolist(), query_start.diff().tolist()
    single = [row for row, count in enumerate(counts) if count == 1]
    if single:
        tokens = query_start[single].long()
        out[tokens] = decode(query[tokens], key_pool, value_pool, block_tables[single], seq_lens[single], scale)
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        for begin in range(0, count, TILE_ROWS) if count > 1 else ():
            size = min(TILE_ROWS, count - begin)
            tile = slice(starts[row] + begin, starts[row] + begin + size)
            cached = length - count + begin
            last = torch.arange(cached, cached + size).unsqueeze(0)
            table = block_tables[row : row + 1, : _width(cached + size, key_pool)]
            out[tile] = reference.attend(query[None, tile], key_pool, value_pool, table, last, scale)[0]
    return out


def _width(length: int, key_pool: Tensor) -> int:
    """Blocks that `length` positions take, at least one."""
    return max(1, -(-length // key_pool.shape[1]))
