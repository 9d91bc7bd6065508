"""Paged prefill attention in Triton: tiles of query tokens attend causally to cached prefix and new tokens alike.

All query heads of one KV head are rows of one tile, so that a tile reads keys and values once. Tiles are numbered
so that the first tile of sequence i is query_start[i] // TOKENS + i: numbers between two sequences may belong to
no tile, and a program finds its sequence without a table that the host would have to make.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from tokenspeed_kernel.ops.attention.triton_sizes import block_dim, bucket_of, head_bytes
from tokenspeed_kernel.registry import register_kernel
from tokenspeed_kernel.rounding import next_power_of_2
from tokenspeed_kernel.tactics import TACTICS, Tactic
from tokenspeed_kernel.triton_language import TRITON, tl, triton
from tokenspeed_kernel.triton_run import run_triton

LOG2_E = 1.4426950408889634
FEWEST_SEQS = 512
"""Sequences for which a kernel is compiled at least: one compile serves all smaller batches."""
TRAITS = MappingProxyType({"head_dim": range(1, 257)})

CANDIDATES = tuple(
    MappingProxyType({"rows": rows, "block_kv": block_kv, "num_warps": warps, "num_stages": stages})
    for rows, block_kv, warps, stages in (
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
    )
)
"""Query rows (tokens times heads) of a tile, positions of one step of the loop, and how a program is compiled."""

WIDE_HEAD = 256
"""Bytes of a head from which on the candidates would not fit into shared memory."""
WIDE_CANDIDATES = (MappingProxyType({"rows": 32, "block_kv": 16, "num_warps": 4, "num_stages": 2}),)


@register_kernel("attention", "extend", **TRITON, traits=TRAITS)
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
    query = query if query.stride(2) == 1 else query.contiguous()
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not out.numel():
        return out

    def run(tactic: Tactic) -> None:
        _launch(query, key_pool, value_pool, block_tables, seq_lens, query_start, scale, out, tactic)

    candidates = WIDE_CANDIDATES if head_bytes(query) > WIDE_HEAD else CANDIDATES
    run(TACTICS.pick("attention.extend.triton", bucket_of(query, key_pool), candidates, run))
    return out


def _launch(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    scale: float,
    out: Tensor,
    tactic: Tactic,
) -> None:
    tokens, heads, head_dim = query.shape
    block_size, kv_heads = key_pool.shape[1:3]
    seqs, group = seq_lens.shape[0], heads // kv_heads
    members = next_power_of_2(group)
    tile_tokens = max(tactic["rows"] // members, 1)
    run_triton(
        extend_kernel,
        (kv_heads, tokens // tile_tokens + seqs + 1),
        query,
        key_pool,
        value_pool,
        block_tables,
        seq_lens,
        query_start,
        out,
        tokens,
        seqs,
        scale * LOG2_E,
        block_size,
        *query.stride()[:2],
        *key_pool.stride()[:3],
        *value_pool.stride()[:3],
        block_tables.stride(0),
        GROUP=group,
        MEMBERS=members,
        TOKENS=tile_tokens,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim(head_dim),
        BLOCK_KV=tactic["block_kv"],
        BLOCK_SEQS=max(next_power_of_2(seqs + 1), FEWEST_SEQS),
        num_warps=tactic["num_warps"],
        num_stages=tactic["num_stages"],
    )


@triton.jit(do_not_specialize=["tokens", "seqs"])
def extend_kernel(
    query,
    key_pool,
    value_pool,
    block_tables,
    seq_lens,
    query_start,
    out,
    tokens,
    seqs,
    scale,
    block_size,
    query_token,
    query_head,
    key_block,
    key_slot,
    key_head,
    value_block,
    value_slot,
    value_head,
    table_stride,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
):
    kv_head = tl.program_id(0)
    # Late tiles see the most positions: they go first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    # Sequence number `seqs` stands for the tokens of padding.
    number = tl.arange(0, BLOCK_SEQS)
    starts = tl.load(query_start + number, mask=number <= seqs, other=0)
    begun = (number <= seqs) & (starts // TOKENS + number <= tile)
    seq = tl.sum(begun.to(tl.int32), axis=0) - 1
    start = tl.load(query_start + seq)
    is_padding = seq == seqs
    stop = tl.load(query_start + seq + 1, mask=seq < seqs, other=0)
    stop = tl.where(is_padding, tokens, stop)
    first_token = start + (tile - start // TOKENS - seq) * TOKENS
    if first_token >= stop:
        return

    row = tl.arange(0, TOKENS * MEMBERS)
    token, member = first_token + row // MEMBERS, row % MEMBERS
    real = (token < stop) & (member < GROUP)
    head = kv_head * GROUP + member
    column = tl.arange(0, BLOCK_DIM)
    inside = column < HEAD_DIM
    mask = real[:, None] & inside[None, :]
    wide_token = token.to(tl.int64)
    place = out + (wide_token * (tl.num_programs(0) * GROUP) + head)[:, None] * HEAD_DIM + column[None, :]
    if is_padding:
        tl.store(place, tl.zeros([TOKENS * MEMBERS, BLOCK_DIM], out.dtype.element_ty), mask=mask)
        return

    q = tl.load(query + (wide_token * query_token + head * query_head)[:, None] + column[None, :], mask=mask, other=0.0)
    length = tl.load(seq_lens + seq)
    cached = length - (stop - start)
    last = cached + token - start
    end = tl.minimum(cached + first_token - start + TOKENS, length)
    whole = (cached + first_token - start + 1) // BLOCK_KV * BLOCK_KV
    table = block_tables + seq.to(tl.int64) * table_stride
    keys = key_pool + kv_head * key_head + column[:, None]
    values = value_pool + kv_head * value_head + column[None, :]
    most = tl.full([TOKENS * MEMBERS], -float("inf"), tl.float32)
    total = tl.zeros([TOKENS * MEMBERS], tl.float32)
    mean = tl.zeros([TOKENS * MEMBERS, BLOCK_DIM], tl.float32)
    # Every row sees these positions whole.
    for first in range(0, whole, BLOCK_KV):
        position = first + tl.arange(0, BLOCK_KV)
        block = tl.load(table + position // block_size).to(tl.int64)
        slot = position % block_size
        k = tl.load(keys + (block * key_block + slot * key_slot)[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(values + (block * value_block + slot * value_slot)[:, None], mask=inside[None, :], other=0.0)
        score = tl.dot(q, k, input_precision="ieee") * scale
        higher = tl.maximum(most, tl.max(score, axis=1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(most - higher)
        mean = tl.dot(weight.to(v.dtype), v, mean * fade[:, None], input_precision="ieee")
        total = total * fade + tl.sum(weight, axis=1)
        most = higher
    for first in range(whole, end, BLOCK_KV):
        position = first + tl.arange(0, BLOCK_KV)
        held = position < end
        block = tl.load(table + position // block_size, mask=held, other=0).to(tl.int64)
        slot = position % block_size
        k = tl.load(
            keys + (block * key_block + slot * key_slot)[None, :], mask=inside[:, None] & held[None, :], other=0.0
        )
        v = tl.load(
            values + (block * value_block + slot * value_slot)[:, None], mask=held[:, None] & inside[None, :], other=0.0
        )
        score = tl.dot(q, k, input_precision="ieee") * scale
        # Position 0 is visible to every row, surplus ones included, so that no row is without a maximum.
        seen = (position[None, :] <= last[:, None]) & held[None, :]
        score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(most, tl.max(score, axis=1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(most - higher)
        mean = tl.dot(weight.to(v.dtype), v, mean * fade[:, None], input_precision="ieee")
        total = total * fade + tl.sum(weight, axis=1)
        most = higher
    tl.store(place, (mean / total[:, None]).to(q.dtype), mask=mask)
