"""Writing to the paged KV cache in Triton: one program a token and head."""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel.registry import register_kernel
from tokenspeed_kernel.rounding import next_power_of_2
from tokenspeed_kernel.triton_language import TRITON, tl, triton
from tokenspeed_kernel.triton_run import run_triton


@register_kernel("kvcache", "write_kv", **TRITON)
def write_kv(key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slot_mapping: Tensor) -> None:
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    tokens, heads, head_dim = key.shape
    if not key.numel():
        return
    run_triton(
        write_kv_kernel,
        (tokens, heads),
        key,
        value,
        key_pool,
        value_pool,
        slot_mapping,
        slot_mapping.stride(0),
        *key.stride()[:2],
        *value.stride()[:2],
        key_pool.shape[1],
        *key_pool.stride()[:3],
        *value_pool.stride()[:3],
        HEAD_DIM=head_dim,
        BLOCK=next_power_of_2(head_dim),
        num_warps=1,
    )


@triton.jit
def write_kv_kernel(
    key,
    value,
    key_pool,
    value_pool,
    slots,
    slots_stride,
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
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token * slots_stride)
    column = tl.arange(0, BLOCK)
    inside = column < HEAD_DIM
    source = tl.load(key + token * key_token + head * key_head + column, mask=inside)
    place = pool_place(key_pool, slot, head, block_size, key_pool_block, key_pool_slot, key_pool_head)
    tl.store(place + column, source, mask=inside)
    source = tl.load(value + token * value_token + head * value_head + column, mask=inside)
    place = pool_place(value_pool, slot, head, block_size, value_pool_block, value_pool_slot, value_pool_head)
    tl.store(place + column, source, mask=inside)


@triton.jit
def pool_place(pool, slot, head, block_size, block_stride, slot_stride, head_stride):
    """Where `head` of `slot`, an int64, begins in a pool."""
    return pool + slot // block_size * block_stride + slot % block_size * slot_stride + head * head_stride
