"""Writing to the paged KV cache in plain torch."""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel.registry import register_kernel


@register_kernel("kvcache", "write_kv", solution="reference")
def write_kv(key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slot_mapping: Tensor) -> None:
    for source, pool in ((key, key_pool), (value, value_pool)):
        if pool.is_contiguous():
            pool.view(-1, *pool.shape[2:]).index_copy_(0, slot_mapping, source)
        else:
            pool.index_put_((slot_mapping // pool.shape[1], slot_mapping % pool.shape[1]), source)
