"""The KV cache memory of one rank."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from tokenspeed.errors import ResourceError
from tokenspeed_kernel.ops.attention.backends import ordered, ordered_shape

CPU_SHARE = 0.25
"""Part of the free memory that the cache takes on a CPU when --max-total-tokens is not given."""
CPU_LIMIT = 8 << 30
"""And no more than this many bytes."""


SCRATCH_SHARE = 1 / 64
"""Part of the cache that more than one scratch block may take."""


@dataclass(frozen=True)
class KVShape:
    """What one token of KV costs on one rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    order: str = "NHD"
    """Order in memory, as the attention backend wants it: see `tokenspeed_kernel.ops.attention.backends.ORDERS`."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        per_token = self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * self.block_size


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that the cache may take: `share` by default, and `most` where a size is asked for."""

    share: int
    most: int

    @classmethod
    def of_host(cls, free: int) -> MemoryBudget:
        """On a CPU, where `free` bytes are free for this rank."""
        return cls(min(int(free * CPU_SHARE), CPU_LIMIT), free)

    @classmethod
    def smallest(cls, budgets: Iterable[MemoryBudget]) -> MemoryBudget:
        """What every one of several ranks can give."""
        shares, mosts = zip(*((budget.share, budget.most) for budget in budgets), strict=True)
        return cls(min(shares), min(mosts))


def plan_blocks(
    shape: KVShape,
    max_total_tokens: int | None,
    max_model_len: int,
    max_num_seqs: int,
    budget: MemoryBudget,
    scratch: int = 1,
) -> int:
    """Usable blocks of the cache (the scratch blocks come on top).

    Args:
        shape: cost of a block.
        max_total_tokens: tokens asked for, or None for what the memory allows.
        max_model_len: tokens of the longest request; a cache that cannot hold one such request is refused.
        max_num_seqs: requests that may run at once; more blocks than they can fill are not taken.
        budget: what the cache may take.
        scratch: scratch blocks, as `plan_scratch` gives them.

    Raises:
        ResourceError: when the memory does not hold the cache, or the cache not one request.
    """
    needed = -(-max_model_len // shape.block_size)
    if max_total_tokens is None:
        blocks = min(budget.share // shape.block_bytes - scratch, needed * max_num_seqs)
    else:
        blocks = max_total_tokens // shape.block_size
        size = (blocks + scratch) * shape.block_bytes
        if size > budget.most:
            raise ResourceError(
                f"--max-total-tokens {max_total_tokens} needs {_mib(size)} of KV cache "
                f"and only {_mib(max(budget.most, 0))} are free; lower it"
            )
    if blocks < needed:
        raise ResourceError(
            f"the KV cache holds {max(blocks, 0) * shape.block_size} tokens, fewer than one request of "
            f"{max_model_len}; lower --max-model-len, raise --max-total-tokens, or free memory"
        )
    return blocks


def plan_scratch(shape: KVShape, tokens: int, max_total_tokens: int | None, budget: MemoryBudget) -> int:
    """Scratch blocks such that each of `tokens` of a dummy step has a slot of its own: at least one block, and no
    more than a small part of the memory, or than `max_total_tokens` leave."""
    room = int(budget.share * SCRATCH_SHARE) // shape.block_bytes
    if max_total_tokens is not None:
        room = min(room, budget.most // shape.block_bytes - max_total_tokens // shape.block_size)
    return max(1, min(-(-tokens // shape.block_size), room))


class KVPool:
    """Keys and values of every layer, in blocks.

    `layers[i]` is (keys, values), each [num_blocks, block_size, num_kv_heads, head_dim] in the memory order of
    `shape.order`. Requests hold blocks 1 to `usable_blocks`. The `scratch` blocks, block 0 and any behind those, are
    never theirs: padding, warm-up and capture write there, padding to block 0.
    """

    def __init__(self, shape: KVShape, usable_blocks: int, device: torch.device, scratch: int = 1):
        self.shape = shape
        self.usable_blocks = usable_blocks
        self.num_blocks = usable_blocks + scratch
        self.scratch = (0, *range(usable_blocks + 1, self.num_blocks))
        self.device = device
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def allocate(self) -> None:
        """Take the memory, zeroed: a padding row may read what nobody wrote."""
        self.layers = [(self._zeros(), self._zeros()) for _ in range(self.shape.num_layers)]

    def _zeros(self) -> torch.Tensor:
        sizes = (self.num_blocks, self.shape.block_size, self.shape.num_kv_heads, self.shape.head_dim)
        shape = ordered_shape(sizes, self.shape.order)
        if self.device.type != "cpu":
            return ordered(torch.zeros(shape, dtype=self.shape.dtype, device=self.device), self.shape.order)
        # numpy asks the system for zeroed pages, which cost nothing until they are used; torch writes the zeros.
        pages = np.zeros(math.prod(shape) * self.shape.dtype.itemsize, dtype=np.uint8)
        return ordered(torch.from_numpy(pages).view(self.shape.dtype).view(shape), self.shape.order)


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.0f} MiB"
