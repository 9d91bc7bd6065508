"""Which KV blocks are in use, and which may be handed out."""

from __future__ import annotations

from collections import OrderedDict


class BlockAllocator:
    """Hands out block ids 1 to `num_blocks`; block 0 is the scratch block and never leaves.

    A block is *used* while its reference count is above zero. After that it is either *free*, or *cached*:
    kept for the prefix index, and handed out again, least recently used first, when no free block is left.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * (num_blocks + 1)
        # A stack, so that the blocks touched last are used again first.
        self._free = list(range(num_blocks, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Unused blocks that keep their content for the prefix index."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with a reference."""
        return self.num_blocks - self.num_available

    def allocate(self) -> int:
        """Hand out one block with one reference. It may have been cached: its old content is to be forgotten.

        Raises:
            IndexError: when none is available; check `num_available` first.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
        else:
            raise IndexError("no KV block is available")
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a used or cached block."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """Drop one reference; the last one makes the block cached if `keep`, otherwise free.

        Raises:
            ValueError: when the block has no reference, which means that it was released twice.
        """
        if self._references[block] <= 0:
            raise ValueError(f"KV block {block} was released more often than taken")
        self._references[block] -= 1
        if self._references[block] > 0:
            return
        if keep:
            self._cached[block] = None
        else:
            self._free.append(block)

    def is_used(self, block: int) -> bool:
        """Whether the block has a reference."""
        return self._references[block] > 0

    def free_cached(self) -> None:
        """Turn every cached block into a free one."""
        self._free.extend(self._cached)
        self._cached.clear()
