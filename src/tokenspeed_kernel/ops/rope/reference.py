"""Rotary position embedding in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.ops.kvcache.reference import write_kv
from tokenspeed_kernel.ops.norm.reference import rms_norm
from tokenspeed_kernel.registry import register_kernel


@register_kernel("rope", "apply_rope", solution="reference")
def apply_rope(positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


@register_kernel("rope", "rope_and_write_kv", solution="reference")
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
    if query_weight is not None and key_weight is not None:
        query, key = rms_norm(query, query_weight, eps), rms_norm(key, key_weight, eps)
    query, key = apply_rope(positions, query, key, cos_sin)
    write_kv(key, value, key_pool, value_pool, slot_mapping)
    return query


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
