"""Rotary embedding in Triton: alone, and in one kernel with the normalisation of heads and the KV write."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.ops.kvcache.triton import pool_place
from tokenspeed_kernel.registry import register_kernel
from tokenspeed_kernel.rounding import cdiv, next_power_of_2
from tokenspeed_kernel.triton_language import TRITON, tl, triton
from tokenspeed_kernel.triton_run import run_triton

HEADS = 4
"""Heads of one program."""


@register_kernel("rope", "apply_rope", **TRITON)
def apply_rope(positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotated(positions, query, cos_sin), _rotated(positions, key, cos_sin)


def _rotated(positions: Tensor, x: Tensor, cos_sin: Tensor) -> Tensor:
    x = x if x.stride(2) == 1 else x.contiguous()
    tokens, heads, head_dim = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        run_triton(
            rotate_kernel,
            (tokens, cdiv(heads, HEADS)),
            positions,
            x,
            cos_sin,
            out,
            heads,
            *x.stride()[:2],
            HALF=head_dim // 2,
            BLOCK=next_power_of_2(head_dim // 2),
            HEADS=HEADS,
            num_warps=2,
        )
    return out


@register_kernel("rope", "rope_and_write_kv", **TRITON)
def rope_and_write_kv(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    slot_mapping: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
) -> Tensor:
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    tokens, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    grid = (tokens, cdiv(heads, HEADS) + cdiv(kv_heads, HEADS))
    run_triton(
        rope_and_write_kv_kernel,
        grid,
        positions,
        query,
        key,
        value,
        cos_sin,
        key_pool,
        value_pool,
        slot_mapping,
        query_weight,
        key_weight,
        out,
        heads,
        kv_heads,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        key_pool.shape[1],
        *key_pool.stride()[:3],
        *value_pool.stride()[:3],
        eps,
        NORMALISE=query_weight is not None,
        HALF=head_dim // 2,
        BLOCK=next_power_of_2(head_dim // 2),
        HEADS=HEADS,
        num_warps=2,
    )
    return out


@triton.jit
def rotate_kernel(
    positions,
    x,
    cos_sin,
    out,
    heads,
    x_token,
    x_head,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    cos, sin = _angles(positions + token, cos_sin, column, HALF)
    inside = (column < HALF) & (head < heads)
    source = x + token * x_token + head * x_head + column
    first, second = _turned(source, source, cos, sin, inside, column, 0.0, False, HALF)
    place = out + (token * heads + head) * (2 * HALF) + column
    tl.store(place, first, mask=inside)
    tl.store(place + HALF, second, mask=inside)


@triton.jit
def rope_and_write_kv_kernel(
    positions,
    query,
    key,
    value,
    cos_sin,
    key_pool,
    value_pool,
    slots,
    query_weight,
    key_weight,
    out,
    heads,
    kv_heads,
    query_token,
    query_head,
    key_token,
    key_head,
    value_token,
    value_head,
    block_size,
    key_pool_block,
    key_pool_slot,
    key_pool_head,
    value_pool_block,
    value_pool_slot,
    value_pool_head,
    eps,
    NORMALISE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts = tl.cdiv(heads, HEADS)
    column = tl.arange(0, BLOCK)[None, :]
    cos, sin = _angles(positions + token, cos_sin, column, HALF)
    if part < query_parts:
        head = part * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (column < HALF) & (head < heads)
        source = query + token * query_token + head * query_head + column
        first, second = _turned(source, query_weight, cos, sin, inside, column, eps, NORMALISE, HALF)
        place = out + (token * heads + head) * (2 * HALF) + column
        tl.store(place, first, mask=inside)
        tl.store(place + HALF, second, mask=inside)
    else:
        head = (part - query_parts) * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (column < HALF) & (head < kv_heads)
        source = key + token * key_token + head * key_head + column
        first, second = _turned(source, key_weight, cos, sin, inside, column, eps, NORMALISE, HALF)
        slot = tl.load(slots + token)
        place = pool_place(key_pool, slot, head, block_size, key_pool_block, key_pool_slot, key_pool_head) + column
        tl.store(place, first, mask=inside)
        tl.store(place + HALF, second, mask=inside)
        source = value + token * value_token + head * value_head + column
        place = pool_place(value_pool, slot, head, block_size, value_pool_block, value_pool_slot, value_pool_head)
        place += column
        tl.store(place, tl.load(source, mask=inside), mask=inside)
        tl.store(place + HALF, tl.load(source + HALF, mask=inside), mask=inside)


@triton.jit
def _angles(position, cos_sin, column, HALF: tl.constexpr):
    """Cosines and sines of the position that is stored at `position`."""
    angle = cos_sin + tl.load(position) * (2 * HALF) + column
    return tl.load(angle, mask=column < HALF, other=0.0), tl.load(angle + HALF, mask=column < HALF, other=0.0)


@triton.jit
def _turned(source, weight, cos, sin, inside, column, eps, NORMALISE: tl.constexpr, HALF: tl.constexpr):
    """The halves of the heads at `source`, normalised and rotated."""
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + HALF, mask=inside, other=0.0)
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    if NORMALISE:
        square = tl.sum(first * first + second * second, axis=1)
        scale = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        # Rounded before and after the weight is applied, as the reference does.
        gain = tl.load(weight + column, mask=column < HALF, other=0.0).to(tl.float32)
        first = ((first * scale).to(dtype).to(tl.float32) * gain).to(dtype).to(tl.float32)
        gain = tl.load(weight + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * gain).to(dtype).to(tl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)
