"""Paged decode attention in Triton: the context of a sequence is split over programs, whose parts are merged.

All query heads of one KV head go through one program, so that keys and values are read once. The grid depends on
shapes only; how long a sequence is, a program reads on the device, and leaves early if its part is empty.
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
from tokenspeed_kernel.workspace import ALIGNMENT, WORKSPACE

MOST_SPLITS = 32
LOG2_E = 1.4426950408889634
TRAITS = MappingProxyType({"head_dim": range(1, 257)})

CANDIDATES = tuple(
    MappingProxyType({"block_kv": block_kv, "programs": programs, "num_warps": warps, "num_stages": stages})
    for block_kv, programs, warps, stages in (
        (64, 528, 4, 3),
        (64, 1056, 4, 2),
        (64, 528, 4, 4),
        (32, 1056, 4, 4),
        (128, 264, 4, 3),
    )
)
"""Positions of one step of the loop, programs that fill a GPU, and how a program is compiled."""

WIDE_HEAD = 512
"""Bytes of a head from which on the candidates would not fit into shared memory."""
WIDE_CANDIDATES = (MappingProxyType({"block_kv": 16, "programs": 528, "num_warps": 4, "num_stages": 2}),)


@register_kernel("attention", "decode", **TRITON, traits=TRAITS)
def decode(
    query: Tensor, key_pool: Tensor, value_pool: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    query = query if query.stride(2) == 1 else query.contiguous()
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not out.numel():
        return out

    def run(tactic: Tactic) -> None:
        _launch(query, key_pool, value_pool, block_tables, seq_lens, scale, out, tactic)

    candidates = WIDE_CANDIDATES if head_bytes(query) > WIDE_HEAD else CANDIDATES
    run(TACTICS.pick("attention.decode.triton", bucket_of(query, key_pool), candidates, run))
    return out


def _launch(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor,
    tactic: Tactic,
) -> None:
    seqs, heads, head_dim = query.shape
    block_size, kv_heads = key_pool.shape[1:3]
    block_kv = tactic["block_kv"]
    splits = count_splits(tactic["programs"], seqs * kv_heads, block_tables.shape[1] * block_size, block_kv)
    parts, sums = out, out
    if splits > 1:
        parts, sums = WORKSPACE.take(
            "attention.decode.triton",
            query.device,
            ((seqs, heads, splits, head_dim), torch.float32),
            ((seqs, heads, splits), torch.float32),
            at_least=workspace_bytes(heads, kv_heads, head_dim),
        )
    group = heads // kv_heads
    run_triton(
        decode_kernel,
        (seqs, kv_heads, splits),
        query,
        key_pool,
        value_pool,
        block_tables,
        seq_lens,
        out,
        parts,
        sums,
        scale * LOG2_E,
        block_size,
        *query.stride()[:2],
        *key_pool.stride()[:3],
        *value_pool.stride()[:3],
        block_tables.stride(0),
        splits,
        GROUP=group,
        ROWS=max(next_power_of_2(group), 16),
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim(head_dim),
        BLOCK_KV=block_kv,
        IS_SPLIT=splits > 1,
        num_warps=tactic["num_warps"],
        num_stages=tactic["num_stages"],
    )
    if splits > 1:
        run_triton(
            merge_kernel,
            (seqs, heads),
            parts,
            sums,
            seq_lens,
            out,
            splits,
            HEAD_DIM=head_dim,
            BLOCK_DIM=block_dim(head_dim),
            BLOCK_KV=block_kv,
            MOST_SPLITS=MOST_SPLITS,
            num_warps=4,
        )


def count_splits(programs: int, parts: int, max_context: int, block_kv: int) -> int:
    """Parts of a context such that all programs fill the GPU, and no part is shorter than one step of the loop."""
    return min(max(1, programs // parts), MOST_SPLITS, max(1, -(-max_context // block_kv)))


def workspace_bytes(heads: int, kv_heads: int, head_dim: int) -> int:
    """What the parts of any number of sequences take: with every tactic, seqs * kv_heads * splits is at most its
    programs wherever there is more than one split."""
    most = max(tactic["programs"] for tactic in CANDIDATES) * (heads // kv_heads)
    return most * (head_dim + 1) * 4 + 2 * ALIGNMENT


# A compile for each batch size would cost more than it gives: what varies with it is no constant.
@triton.jit(do_not_specialize=["splits"])
def decode_kernel(
    query,
    key_pool,
    value_pool,
    block_tables,
    seq_lens,
    out,
    parts,
    sums,
    scale,
    block_size,
    query_seq,
    query_head,
    key_block,
    key_slot,
    key_head,
    value_block,
    value_slot,
    value_head,
    table_stride,
    splits,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens + seq)
    share = tl.cdiv(tl.cdiv(length, splits), BLOCK_KV) * BLOCK_KV
    begin = split * share
    end = tl.minimum(begin + share, length)
    # An empty part is not read by the merge. Without a merge a row of padding gets zeros.
    if IS_SPLIT and begin >= end:
        return
    member = tl.arange(0, ROWS)
    head = kv_head * GROUP + member
    column = tl.arange(0, BLOCK_DIM)
    inside = column < HEAD_DIM
    row_inside = (member < GROUP)[:, None] & inside[None, :]
    source = query + seq * query_seq + head[:, None] * query_head + column[None, :]
    q = tl.load(source, mask=row_inside, other=0.0)
    table = block_tables + seq * table_stride
    keys = key_pool + kv_head * key_head + column[:, None]
    values = value_pool + kv_head * value_head + column[None, :]
    most = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    for first in range(begin, end, BLOCK_KV):
        position = first + tl.arange(0, BLOCK_KV)
        seen = position < end
        block = tl.load(table + position // block_size, mask=seen, other=0).to(tl.int64)
        slot = position % block_size
        k = tl.load(
            keys + (block * key_block + slot * key_slot)[None, :], mask=inside[:, None] & seen[None, :], other=0.0
        )
        score = tl.dot(q, k, input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, -float("inf"))
        higher = tl.maximum(most, tl.max(score, axis=1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(most - higher)
        v = tl.load(
            values + (block * value_block + slot * value_slot)[:, None], mask=seen[:, None] & inside[None, :], other=0.0
        )
        mean = tl.dot(weight.to(v.dtype), v, mean * fade[:, None], input_precision="ieee")
        total = total * fade + tl.sum(weight, axis=1)
        most = higher
    if not IS_SPLIT:
        mean = mean / tl.where(total > 0, total, 1.0)[:, None]
        place = out + (seq * tl.num_programs(1) * GROUP + head[:, None]) * HEAD_DIM + column[None, :]
        tl.store(place, mean.to(q.dtype), mask=row_inside)
    else:
        part = (seq * tl.num_programs(1) * GROUP + head) * splits + split
        tl.store(parts + part[:, None] * HEAD_DIM + column[None, :], mean / total[:, None], mask=row_inside)
        tl.store(sums + part, most + tl.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    parts,
    sums,
    seq_lens,
    out,
    splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """Average the parts of one sequence and head, weighted by the sums of their softmax."""
    seq = tl.program_id(0).to(tl.int64)
    row = seq * tl.num_programs(1) + tl.program_id(1)
    length = tl.load(seq_lens + seq)
    share = tl.cdiv(tl.cdiv(length, splits), BLOCK_KV) * BLOCK_KV
    split = tl.arange(0, MOST_SPLITS)
    filled = split * share < length
    filled = filled & (split < splits)
    column = tl.arange(0, BLOCK_DIM)
    inside = column < HEAD_DIM
    log = tl.load(sums + row * splits + split, mask=filled, other=-float("inf"))
    weight = tl.exp2(log - tl.maximum(tl.max(log, axis=0), -1e30))
    total = tl.sum(weight, axis=0)
    source = parts + (row * splits + split[:, None]) * HEAD_DIM + column[None, :]
    part = tl.load(source, mask=filled[:, None] & inside[None, :], other=0.0)
    mean = tl.sum(part * weight[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * HEAD_DIM + column, mean.to(out.dtype.element_ty), mask=inside)
