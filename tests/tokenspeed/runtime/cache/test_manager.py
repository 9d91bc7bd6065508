from __future__ import annotations

from tokenspeed.runtime.cache.manager import BlockTable, KVCacheManager


def computed(cache: KVCacheManager, token_ids: list[int]) -> BlockTable:
    """A table whose tokens are all computed and committed."""
    table = BlockTable()
    assert cache.admit(table, token_ids, headroom=0) is not None
    cache.publish(table, token_ids, len(token_ids))
    return table


def test_a_request_gets_just_the_blocks_that_its_tokens_need() -> None:
    cache = KVCacheManager(num_blocks=4, block_size=4)
    table = BlockTable()
    assert cache.admit(table, [1] * 9, headroom=0) == 0
    assert len(table.blocks) == cache.used_blocks == 3
    assert cache.grow(table)
    assert not cache.grow(table)
    cache.release(table)
    assert cache.used_blocks == 0


def test_too_few_blocks_take_nothing() -> None:
    cache = KVCacheManager(num_blocks=4, block_size=2)
    computed(cache, [1, 2, 3, 4])
    table = BlockTable()
    assert cache.admit(table, [1, 2, 3, 4, 5, 6, 7, 8, 9], headroom=0) is None
    assert cache.admit(table, [1, 2, 3, 4, 5], headroom=2) is None
    assert (table.blocks, cache.used_blocks) == ([], 2)
    assert cache.admit(table, [1, 2, 3, 4, 5], headroom=1) == 4


def test_a_prefix_is_shared_while_both_live() -> None:
    cache = KVCacheManager(num_blocks=8, block_size=2)
    first = computed(cache, [1, 2, 3, 4, 5])
    second = computed(cache, [1, 2, 3, 4, 6])
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    assert cache.used_blocks == 4
    cache.release(first)
    assert cache.used_blocks == 3
    cache.release(second)
    assert (cache.used_blocks, cache.cached_blocks) == (0, 2)


def test_the_last_token_is_never_found() -> None:
    cache = KVCacheManager(num_blocks=8, block_size=2)
    computed(cache, [1, 2, 3, 4])
    assert cache.admit(BlockTable(), [1, 2, 3, 4], headroom=0) == 2


def test_unused_blocks_are_found_again_until_they_are_needed() -> None:
    cache = KVCacheManager(num_blocks=3, block_size=1)
    cache.release(computed(cache, [1, 2, 3]))
    other = computed(cache, [7])
    assert cache.cached_blocks == 2, "the end of the prefix went first"
    cache.release(other)
    cache.flush()
    assert cache.cached_blocks == 0


def test_found_blocks_that_nobody_uses_count_against_the_room() -> None:
    cache = KVCacheManager(num_blocks=3, block_size=1)
    cache.release(computed(cache, [1, 2]))
    computed(cache, [7])
    assert cache.admit(BlockTable(), [1, 2, 3], headroom=0) is None


def test_blocks_from_before_a_flush_are_not_found_even_when_committed_after_it() -> None:
    cache = KVCacheManager(num_blocks=8, block_size=1)
    table = computed(cache, [1, 2])
    cache.flush()
    assert cache.used_blocks == 2
    assert cache.grow(table)
    cache.publish(table, [1, 2, 3], 3)
    assert cache.admit(BlockTable(), [1, 2, 3, 4], headroom=0) == 0
    cache.release(table)
    assert cache.cached_blocks == 0


def test_a_reseed_forgets_like_a_flush() -> None:
    cache = KVCacheManager(num_blocks=8, block_size=1)
    cache.release(computed(cache, [1, 2]))
    cache.reseed(1, "v2")
    assert cache.cached_blocks == 0
    assert cache.admit(BlockTable(), [1, 2, 3], headroom=0) == 0


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    cache = KVCacheManager(num_blocks=4, block_size=1, enable_prefix_caching=False)
    cache.release(computed(cache, [1, 2]))
    assert cache.cached_blocks == 0
    assert cache.admit(BlockTable(), [1, 2, 3], headroom=0) == 0


def test_a_released_list_of_blocks_keeps_its_content() -> None:
    cache = KVCacheManager(num_blocks=4, block_size=1)
    table = computed(cache, [1, 2])
    snapshot, blocks = table.blocks, list(table.blocks)
    cache.release(table)
    computed(cache, [3, 4, 5])
    assert snapshot == blocks
    assert table.blocks == []
