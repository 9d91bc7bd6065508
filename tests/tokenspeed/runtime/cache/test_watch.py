"""What is told of the prefix index is what can be found in it."""

from __future__ import annotations

import random

from tokenspeed.runtime.cache.manager import BlockTable, KVCacheManager
from tokenspeed.runtime.cache.watch import IndexWatch
from tokenspeed.runtime.protocol.cache import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent

SIZE = 2

Known = dict[int, tuple[int | None, tuple[int, ...]]]


def apply(known: Known, events: list[CacheEvent]) -> None:
    for event in events:
        match event:
            case CacheCleared():
                known.clear()
            case BlocksRemoved():
                for removed in event.hashes:
                    del known[removed]
            case BlocksStored():
                parent = event.parent
                for block in event.blocks:
                    assert block.block_hash not in known
                    known[block.block_hash] = parent, tuple(block.token_ids)
                    parent = block.block_hash


def texts(known: Known) -> set[tuple[int, ...]]:
    """Every token sequence that is known up to its start."""
    found = set()
    for block in known:
        ids: tuple[int, ...] = ()
        at: int | None = block
        while at is not None and at in known:
            parent, own = known[at]
            ids, at = own + ids, parent
        if at is None:
            found.add(ids)
    return found


def serve(cache: KVCacheManager, tokens: list[int]) -> int | None:
    """Compute a prompt and give its blocks back; how many of its tokens were found."""
    table = BlockTable()
    found = cache.admit(table, tokens, 0)
    if found is not None:
        cache.publish(table, tokens, len(tokens))
        cache.release(table)
    return found


def snapshot_of(cache: KVCacheManager, watch: IndexWatch | None) -> Known:
    known: Known = {}
    apply(known, list(cache.watch(watch)))
    return known


def test_events_and_snapshots_agree_over_a_long_life() -> None:
    chance = random.Random(0)
    cache, watch = KVCacheManager(num_blocks=20, block_size=SIZE), IndexWatch()
    known = snapshot_of(cache, watch)
    for turn in range(2000):
        serve(cache, [chance.randrange(2) for _ in range(chance.randrange(1, 12))])
        if chance.random() < 0.01:
            cache.flush()
        if chance.random() < 0.01:
            cache.reseed(turn, "w")
        apply(known, watch.take())
        if turn % 20 == 0:
            assert texts(known) == texts(snapshot_of(cache, watch))
    assert texts(known)


def test_what_is_told_can_be_found() -> None:
    chance = random.Random(1)
    cache = KVCacheManager(num_blocks=40, block_size=SIZE)
    for _ in range(300):
        serve(cache, [chance.randrange(2) for _ in range(chance.randrange(1, 16))])
    longest = max(texts(snapshot_of(cache, None)), key=len)
    assert len(longest) > 4
    assert cache.admit(BlockTable(), [*longest, 5], 0) == len(longest)


def test_nothing_is_gathered_for_nobody() -> None:
    cache, watch = KVCacheManager(num_blocks=20, block_size=SIZE), IndexWatch()
    serve(cache, [1, 2, 3, 4, 5])
    cache.watch(watch)
    cache.watch(None)
    serve(cache, [6, 7, 8, 9])
    cache.flush()
    assert watch.take() == []


def test_a_run_has_the_block_before_it_as_its_parent() -> None:
    cache, watch = KVCacheManager(num_blocks=20, block_size=SIZE), IndexWatch()
    serve(cache, [1, 2, 3, 4])
    (first,) = cache.watch(watch)
    assert (first.parent, [block.token_ids for block in first.blocks]) == (None, [[1, 2], [3, 4]])
    serve(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    (second,) = watch.take()
    assert isinstance(second, BlocksStored)
    assert second.parent == first.blocks[1].block_hash
    assert [block.token_ids for block in second.blocks] == [[5, 6], [7, 8]]


def test_a_flush_makes_what_came_before_uninteresting() -> None:
    cache, watch = KVCacheManager(num_blocks=20, block_size=SIZE), IndexWatch()
    cache.watch(watch)
    serve(cache, [1, 2, 3, 4])
    cache.flush()
    assert watch.take() == [CacheCleared()]
