"""What the prefix index holds, and what changes in it."""

from __future__ import annotations

import msgspec

from tokenspeed.runtime.protocol.message import Message


class CachedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One full KV block of the prefix index. Equal hashes mean equal tokens from the start, as far as 64 bits tell."""

    block_hash: int
    """Signed, 64 bits."""
    token_ids: list[int]


class BlocksStored(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Blocks that follow each other can be found from now on."""

    parent: int | None
    """Hash of the block before the first of them; None at the start of a prompt."""
    blocks: list[CachedBlock]


class BlocksRemoved(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Blocks can be found no longer."""

    hashes: list[int]


class CacheCleared(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """No block can be found any longer."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared


class CacheSnapshot(Message, frozen=True):
    """All that the prefix index holds, parents before children; the answer to the `WatchCache` of this `watch`."""

    watch: int
    stored: list[BlocksStored]


class CacheEvents(Message, frozen=True):
    """What changed in the prefix index since the last message of this kind, or since the snapshot."""

    events: list[CacheEvent]
