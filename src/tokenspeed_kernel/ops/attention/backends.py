"""Backends of attention: sets of solutions that share a KV cache, in the memory order that suits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from tokenspeed_kernel.registry import Kernel

ORDERS: Mapping[str, tuple[int, int, int, int]] = MappingProxyType({"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3)})
"""Order in memory of a pool's dimensions block, slot, head, number: the tokens of a block one after another with
all heads, or head after head with all tokens. Every kernel sees [blocks, block_size, kv_heads, head_dim]."""


@dataclass(frozen=True)
class Backend:
    """`solutions` of decode and prefill, of which the best that serves is taken, and the order of their cache."""

    solutions: tuple[str, ...]
    order: str


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "triton": Backend(("triton",), "NHD"),
        "torch": Backend(("trimmed", "reference"), "NHD"),
        "flash_attn": Backend(("flash_attn",), "NHD"),
    }
)


def solutions_of(backend: str) -> Mapping[str, tuple[str, ...]]:
    """What `--attention-backend` permits for each operation."""
    solutions = BACKENDS[backend].solutions
    return {"attention.decode": solutions, "attention.extend": solutions}


def backend_of(kernel: Kernel) -> str | None:
    """The backend that a solution of attention belongs to; None for one that no backend names."""
    return next((name for name, backend in BACKENDS.items() if kernel.solution in backend.solutions), None)


def order_of(kernel: Kernel) -> str:
    """The memory order that suits a solution of attention."""
    backend = backend_of(kernel)
    return "NHD" if backend is None else BACKENDS[backend].order


def ordered(pool: Tensor, order: str) -> Tensor:
    """[blocks, block_size, kv_heads, head_dim] over memory `pool`, whose dimensions stand in `order`."""
    return pool.permute(ORDERS[order])


def ordered_shape(shape: tuple[int, int, int, int], order: str) -> torch.Size:
    """Shape of the memory of a pool of `shape`."""
    return torch.Size(shape[dimension] for dimension in ORDERS[order])
