"""How much KV cache is taken, and when there is too little."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.errors import ResourceError
from tokenspeed.runtime.cache.pool import CPU_LIMIT, CPU_SHARE, KVPool, KVShape, MemoryBudget, plan_blocks, plan_scratch

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=8, block_size=16, dtype=torch.float32)
PLENTY = MemoryBudget.of_host(64 << 30)


def test_a_block_costs_keys_and_values_of_every_layer() -> None:
    assert SHAPE.block_bytes == 2 * 2 * 3 * 8 * 4 * 16


def test_tokens_asked_for_are_rounded_down_to_blocks() -> None:
    assert plan_blocks(SHAPE, 1000, max_model_len=100, max_num_seqs=4, budget=PLENTY) == 62


def test_by_default_no_more_is_taken_than_the_requests_can_fill() -> None:
    assert plan_blocks(SHAPE, None, max_model_len=100, max_num_seqs=4, budget=PLENTY) == 7 * 4


def test_by_default_a_share_of_the_free_memory_is_the_limit() -> None:
    free = MemoryBudget.of_host(100 * SHAPE.block_bytes)
    assert plan_blocks(SHAPE, None, max_model_len=16, max_num_seqs=1000, budget=free) == int(100 * CPU_SHARE) - 1
    assert (
        plan_blocks(SHAPE, None, max_model_len=16, max_num_seqs=1 << 40, budget=MemoryBudget.of_host(1 << 50))
        == CPU_LIMIT // SHAPE.block_bytes - 1
    )


def test_the_rank_with_the_least_memory_sets_the_size() -> None:
    budgets = [MemoryBudget(300, 900), MemoryBudget(200, 1000), MemoryBudget(250, 800)]
    assert MemoryBudget.smallest(budgets) == MemoryBudget(200, 800)


def test_more_tokens_than_memory_are_refused() -> None:
    with pytest.raises(ResourceError, match=r"--max-total-tokens 1000000 needs .* lower it"):
        plan_blocks(SHAPE, 1_000_000, max_model_len=100, max_num_seqs=4, budget=MemoryBudget.of_host(1 << 20))


@pytest.mark.parametrize("asked", [64, None])
def test_a_cache_that_cannot_hold_one_request_is_refused(asked: int | None) -> None:
    with pytest.raises(ResourceError, match="fewer than one request of 4096; lower --max-model-len"):
        plan_blocks(SHAPE, asked, max_model_len=4096, max_num_seqs=4, budget=MemoryBudget.of_host(1 << 20))


def test_on_a_gpu_what_is_left_is_the_limit_and_may_be_nothing() -> None:
    left = MemoryBudget(10 * SHAPE.block_bytes, 20 * SHAPE.block_bytes)
    assert plan_blocks(SHAPE, None, max_model_len=16, max_num_seqs=1000, budget=left) == 9
    assert plan_blocks(SHAPE, 19 * 16, max_model_len=16, max_num_seqs=1, budget=left) == 19
    with pytest.raises(ResourceError, match="only 0 MiB are free"):
        plan_blocks(SHAPE, 64, max_model_len=16, max_num_seqs=1, budget=MemoryBudget(-1, -1))


def test_the_pool_has_one_pair_a_layer() -> None:
    pool = KVPool(SHAPE, 2, torch.device("cpu"), scratch=3)
    assert pool.layers == []
    assert pool.scratch == (0, 3, 4)
    pool.allocate()
    assert len(pool.layers) == 2
    for keys, values in pool.layers:
        assert keys.shape == values.shape == (5, 16, 3, 8)
        assert not keys.any() and not values.any()


def test_scratch_blocks_take_a_small_part_of_what_is_there() -> None:
    plenty = MemoryBudget(6400 * SHAPE.block_bytes, 6400 * SHAPE.block_bytes)
    assert [plan_scratch(SHAPE, tokens, None, plenty) for tokens in (1, 16, 17, 256, 10_000)] == [1, 1, 2, 16, 100]
    assert plan_scratch(SHAPE, 256, None, MemoryBudget(-5, -5)) == 1
    for asked in (6399, 6397, 6000):
        scratch = plan_scratch(SHAPE, 256, asked * 16, plenty)
        assert scratch == max(1, min(16, 6400 - asked))
        assert plan_blocks(SHAPE, asked * 16, 16, 1, plenty, scratch) == asked
