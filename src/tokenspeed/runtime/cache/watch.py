"""What changes in the prefix index, for those who route requests by it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import NamedTuple

from tokenspeed.runtime.protocol.cache import BlocksRemoved, BlocksStored, CacheCleared, CachedBlock, CacheEvent


class Content(NamedTuple):
    """What an indexed block stands for."""

    parent: bytes
    """Digest of the block before it, or the root's."""
    token_ids: bytes
    """As int64, as they were hashed."""


class IndexWatch:
    """Gathers events until somebody takes them."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def stored(self, digest: bytes, content: Content, root: bytes) -> None:
        """A block can be found now."""
        _append(self._events, digest, content, root)

    def removed(self, digest: bytes) -> None:
        """A block can be found no longer."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved):
            last.hashes.append(block_hash(digest))
        else:
            self._events.append(BlocksRemoved(hashes=[block_hash(digest)]))

    def cleared(self) -> None:
        """No block can be found any longer, so what came before is of no interest."""
        self._events = [CacheCleared()]

    def take(self) -> list[CacheEvent]:
        """The events since the last call, oldest first."""
        events, self._events = self._events, []
        return events


def snapshot(contents: Mapping[bytes, Content], root: bytes) -> list[BlocksStored]:
    """All blocks that can be found from `root`, parents before children, in runs as long as they come."""
    children: dict[bytes, list[bytes]] = {}
    for digest, content in contents.items():
        children.setdefault(content.parent, []).append(digest)
    events: list[CacheEvent] = []
    waiting = children.get(root, [])[::-1]
    while waiting:
        digest = waiting.pop()
        _append(events, digest, contents[digest], root)
        waiting.extend(children.get(digest, [])[::-1])
    return [event for event in events if isinstance(event, BlocksStored)]


def block_hash(digest: bytes) -> int:
    """The first 64 bits of a digest, signed."""
    return int.from_bytes(digest[:8], "little", signed=True)


def _append(events: list[CacheEvent], digest: bytes, content: Content, root: bytes) -> None:
    """Add a block, to the last run if it continues that."""
    block = CachedBlock(block_hash=block_hash(digest), token_ids=array("q", content.token_ids).tolist())
    parent = None if content.parent == root else block_hash(content.parent)
    last = events[-1] if events else None
    if isinstance(last, BlocksStored) and parent is not None and last.blocks[-1].block_hash == parent:
        last.blocks.append(block)
    else:
        events.append(BlocksStored(parent=parent, blocks=[block]))
