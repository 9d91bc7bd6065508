"""Which full KV blocks hold which tokens, so that a prompt that starts like an earlier one reuses them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from tokenspeed.runtime.cache.watch import Content, IndexWatch, snapshot
from tokenspeed.runtime.protocol.cache import BlocksStored

DIGEST_BYTES = 16


@dataclass(slots=True)
class DigestChain:
    """The block digests of one token sequence, as far as they were needed, under one epoch of the index."""

    epoch: int = -1
    digests: list[bytes] = field(default_factory=list)


class PrefixIndex:
    """Full blocks by the digest of their tokens and of everything before them.

    The digest of block i covers the digest of block i-1, and that of block 0 the seed (generation and weight
    version), so equal digests mean equal tokens from the start, computed by the same code and weights.
    A cryptographic hash keeps them equal on every rank (the hash of a str differs per process) and free of
    collisions that a client could construct.

    `epoch` counts the resets. A chain of an earlier epoch is never inserted: its KV was computed before.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.epoch = 0
        self._root = _seed_digest(0, "")
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._contents: dict[bytes, Content] = {}
        self._watch: IndexWatch | None = None

    def __contains__(self, block: int) -> bool:
        return block in self._digest_of

    def match(self, chain: DigestChain, token_ids: Sequence[int], max_blocks: int) -> list[int]:
        """The longest run of indexed blocks, from the start of `token_ids`, at most `max_blocks`.

        Moves the chain to the present epoch: from here on it stands for KV that starts with these blocks.
        """
        if chain.epoch != self.epoch:
            chain.epoch = self.epoch
            chain.digests = []
        found: list[int] = []
        for position in range(max_blocks):
            block = self._block_of.get(self._digest(chain, token_ids, position))
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, chain: DigestChain, token_ids: Sequence[int], position: int, block: int) -> None:
        """Make `block` findable as the full block at `position` of `token_ids`.

        Nothing happens when the chain is of an earlier epoch, or when another block has this content already.
        """
        if chain.epoch != self.epoch:
            return
        digest = self._digest(chain, token_ids, position)
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest
            parent = chain.digests[position - 1] if position else self._root
            self._contents[digest] = Content(parent, self._ids(token_ids, position))
            if self._watch is not None:
                self._watch.stored(digest, self._contents[digest], self._root)

    def evict(self, block: int) -> None:
        """Forget a block, if it is indexed."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest], self._contents[digest]
            if self._watch is not None:
                self._watch.removed(digest)

    def clear(self) -> None:
        """Forget all blocks, and all chains that were begun."""
        self._block_of.clear()
        self._digest_of.clear()
        self._contents.clear()
        self.epoch += 1
        if self._watch is not None:
            self._watch.cleared()

    def watch(self, watch: IndexWatch | None) -> list[BlocksStored]:
        """Tell `watch` of all changes from now on; all that can be found now, parents before children."""
        self._watch = watch
        return snapshot(self._contents, self._root)

    def reset(self, generation: int, weight_version: str) -> None:
        """`clear`, and seed the digests to come with the code generation and the weight version."""
        self.clear()
        self._root = _seed_digest(generation, weight_version)

    def _digest(self, chain: DigestChain, token_ids: Sequence[int], position: int) -> bytes:
        digests = chain.digests
        for index in range(len(digests), position + 1):
            parent = digests[index - 1] if index else self._root
            digests.append(blake2b(parent + self._ids(token_ids, index), digest_size=DIGEST_BYTES).digest())
        return digests[position]

    def _ids(self, token_ids: Sequence[int], position: int) -> bytes:
        size = self.block_size
        return array("q", token_ids[position * size : (position + 1) * size]).tobytes()


def _seed_digest(generation: int, weight_version: str) -> bytes:
    return blake2b(f"{generation}:{weight_version}".encode(), digest_size=DIGEST_BYTES).digest()
