"""The KV blocks of every request: taken, shared through the prefix index, and given back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenspeed.runtime.cache.blocks import BlockAllocator
from tokenspeed.runtime.cache.prefix import DigestChain, PrefixIndex
from tokenspeed.runtime.cache.watch import IndexWatch
from tokenspeed.runtime.protocol.cache import BlocksStored


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request.

    Token i lives in slot `blocks[i // block_size] * block_size + i % block_size`. The list only ever grows:
    a release puts a new list in its place, so whoever holds the old one still reads what it was.
    """

    blocks: list[int] = field(default_factory=list)
    chain: DigestChain = field(default_factory=DigestChain)
    num_published: int = 0
    """Leading full blocks that were found in the prefix index or offered to it."""


class KVCacheManager:
    """Block bookkeeping for a pool of `num_blocks` blocks of `block_size` tokens, scratch block not counted.

    Without prefix caching nothing is found and nothing kept. No method touches a device.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._allocator = BlockAllocator(num_blocks)
        self._index = PrefixIndex(block_size)

    @property
    def max_tokens(self) -> int:
        """Tokens that one request alone could store."""
        return self.num_blocks * self.block_size

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self._allocator.num_used

    @property
    def cached_blocks(self) -> int:
        """Blocks that only the prefix index keeps."""
        return self._allocator.num_cached

    def admit(self, table: BlockTable, token_ids: Sequence[int], headroom: int, reuse: bool = True) -> int | None:
        """Fill an empty table with blocks for all of `token_ids`, beginning with those of the prefix index.

        At least the last token is never among the found ones: something has to be computed to sample from.

        Args:
            headroom: blocks that must stay available afterwards.
            reuse: False finds nothing, for a request that needs the forward pass of all of its tokens.

        Returns:
            The number of tokens whose KV was found; None, with nothing taken, when too few blocks are left.
        """
        size = self.block_size
        found: list[int] = []
        if self.enable_prefix_caching:
            found = self._index.match(table.chain, token_ids, (len(token_ids) - 1) // size if reuse else 0)
        allocator = self._allocator
        missing = -(-len(token_ids) // size) - len(found)
        revived = sum(not allocator.is_used(block) for block in found)
        if missing + revived + headroom > allocator.num_available:
            return None
        for block in found:
            allocator.share(block)
        table.blocks = found + [self._allocate() for _ in range(missing)]
        table.num_published = len(found)
        return len(found) * size

    def grow(self, table: BlockTable) -> bool:
        """Add one block to the table; False when none is available."""
        if not self._allocator.num_available:
            return False
        table.blocks.append(self._allocate())
        return True

    def publish(self, table: BlockTable, token_ids: Sequence[int], num_tokens: int) -> None:
        """Make the blocks findable that the first `num_tokens` tokens fill; their KV must be computed."""
        num_full = num_tokens // self.block_size
        if self.enable_prefix_caching:
            for position in range(table.num_published, num_full):
                self._index.insert(table.chain, token_ids, position, table.blocks[position])
        table.num_published = num_full

    def release(self, table: BlockTable) -> None:
        """Give all blocks of the table back; indexed ones stay findable until they are needed."""
        # The end of a prefix first: it is worth less than its beginning, without which it cannot be found.
        for block in reversed(table.blocks):
            self._allocator.release(block, keep=block in self._index)
        table.blocks = []
        table.num_published = 0

    def flush(self) -> None:
        """Forget the prefix index; tables keep their blocks, but none computed so far is ever found again."""
        self._index.clear()
        self._allocator.free_cached()

    def reseed(self, generation: int, weight_version: str) -> None:
        """`flush`, and seed the index with the code generation and weight version that compute next."""
        self._index.reset(generation, weight_version)
        self._allocator.free_cached()

    def watch(self, watch: IndexWatch | None) -> list[BlocksStored]:
        """See `PrefixIndex.watch`."""
        return self._index.watch(watch)

    def _allocate(self) -> int:
        block = self._allocator.allocate()
        self._index.evict(block)
        return block
