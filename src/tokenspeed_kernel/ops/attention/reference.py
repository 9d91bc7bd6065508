"""Paged attention in plain torch, with every shape fixed by the shapes of the arguments."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tokenspeed_kernel.registry import register_kernel

GATHER_COST = 16
"""Gathering the KV of a tile costs about as much as attending to it with this many query rows."""

CHUNK_ELEMENTS = 2**24
"""Bound of the elements (gathered KV and masks) that are held at once, unless one tile alone exceeds it."""


@register_kernel("attention", "decode", solution="reference")
def decode(
    query: Tensor, key_pool: Tensor, value_pool: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    last = (seq_lens.long() - 1).unsqueeze(1)
    return attend(query.unsqueeze(1), key_pool, value_pool, block_tables, last, scale).squeeze(1)


@register_kernel("attention", "extend", solution="reference")
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
    """Cut each sequence's rows into tiles of equal size, so that a tile belongs to one sequence.

    How many tiles a sequence has is known to tensors only, but all together have at most
    tokens / rows + sequences, which is the number computed; surplus tiles are not read.
    """
    num_tokens, num_seqs = query.shape[0], seq_lens.shape[0]
    rows = _tile_rows(num_tokens, num_seqs, max_query_len)
    num_tiles = num_tokens // rows + num_seqs
    start = query_start.long()
    lengths = start.diff()
    tile_end = ((lengths + rows - 1) // rows).cumsum(0)
    tile_start = torch.nn.functional.pad(tile_end, (1, 0))

    tile = torch.arange(num_tiles, device=query.device)
    seq = torch.searchsorted(tile_end, tile, right=True).clamp(max=num_seqs - 1)
    row = torch.arange(rows, device=query.device)
    offset = ((tile - tile_start[seq]) * rows).unsqueeze(1) + row
    inside = offset < lengths[seq].unsqueeze(1)
    token = torch.where(inside, start[seq].unsqueeze(1) + offset, 0)
    last = torch.where(inside, (seq_lens - lengths)[seq].unsqueeze(1) + offset, 0)
    tiles = query.index_select(0, token.flatten()).unflatten(0, (num_tiles, rows))
    out = attend(tiles, key_pool, value_pool, block_tables.index_select(0, seq), last, scale)

    token = torch.arange(num_tokens, device=query.device)
    seq = torch.searchsorted(start[1:], token, right=True).clamp(max=num_seqs - 1)
    place = tile_start[seq] * rows + token - start[seq]
    return out.flatten(0, 1).index_select(0, place.clamp(max=num_tiles * rows - 1))


def attend(
    query: Tensor, key_pool: Tensor, value_pool: Tensor, block_tables: Tensor, last: Tensor, scale: float
) -> Tensor:
    """Attention of tiles, each of one sequence; row r of a tile sees positions 0 to last[tile, r].

    Args:
        query: [tiles, rows, heads, head_dim].
        key_pool: [blocks, block_size, kv_heads, head_dim].
        value_pool: like `key_pool`.
        block_tables: [tiles, width].
        last: int64 [tiles, rows]; below 0 for a row whose result is not used.
        scale: factor of the scores.

    Returns:
        [tiles, rows, heads, head_dim].
    """
    num_tiles, rows = last.shape
    block_size, kv_heads, head_dim = key_pool.shape[1:]
    per_tile = block_tables.shape[1] * block_size * (2 * kv_heads * head_dim + rows)
    chunk = max(1, CHUNK_ELEMENTS // per_tile)
    if num_tiles <= chunk:
        return _attend(query, key_pool, value_pool, block_tables, last, scale)
    parts = [slice(begin, begin + chunk) for begin in range(0, num_tiles, chunk)]
    return torch.cat([_attend(query[p], key_pool, value_pool, block_tables[p], last[p], scale) for p in parts])


def _attend(
    query: Tensor, key_pool: Tensor, value_pool: Tensor, block_tables: Tensor, last: Tensor, scale: float
) -> Tensor:
    block_size = key_pool.shape[1]
    position = torch.arange(block_tables.shape[1] * block_size, device=query.device)
    last = last.clamp(min=0)
    # Positions that no row sees are read from position 0: even masked, a slot spreads a NaN that it holds.
    seen = torch.where(position <= last.amax(1, keepdim=True), position, 0)
    slots = block_tables.long().gather(1, seen // block_size) * block_size + seen % block_size
    keys, values = (_gather(pool, slots).transpose(1, 2) for pool in (key_pool, value_pool))
    visible = position <= last.unsqueeze(-1)
    out = scaled_dot_product_attention(
        query.transpose(1, 2), keys, values, attn_mask=visible.unsqueeze(1), scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def _gather(pool: Tensor, slots: Tensor) -> Tensor:
    """[..., kv_heads, head_dim] of the slots [...]."""
    if not pool.is_contiguous():
        return pool[slots // pool.shape[1], slots % pool.shape[1]]
    flat = pool.view(-1, pool.shape[2] * pool.shape[3])
    return flat.index_select(0, slots.flatten()).view(*slots.shape, *pool.shape[2:])


def _tile_rows(num_tokens: int, num_seqs: int, max_query_len: int) -> int:
    """Rows of a tile: a power of two that balances gathers (small tiles) with padding (large ones)."""
    best = math.sqrt(GATHER_COST * num_tokens / num_seqs)
    return min(max_query_len, 2 ** round(math.log2(max(1.0, best))))
