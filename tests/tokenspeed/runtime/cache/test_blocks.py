from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenspeed.runtime.cache.blocks import BlockAllocator


def test_every_block_but_the_scratch_block_is_handed_out_once() -> None:
    allocator = BlockAllocator(5)
    assert sorted(allocator.allocate() for _ in range(5)) == [1, 2, 3, 4, 5]
    assert allocator.num_used == 5
    with pytest.raises(IndexError, match="no KV block"):
        allocator.allocate()


def test_a_shared_block_stays_used_until_its_last_reference_goes() -> None:
    allocator = BlockAllocator(1)
    block = allocator.allocate()
    allocator.share(block)
    allocator.release(block, keep=False)
    assert allocator.is_used(block)
    allocator.release(block, keep=False)
    assert not allocator.is_used(block)
    with pytest.raises(ValueError, match="released more often"):
        allocator.release(block, keep=False)


def test_cached_blocks_go_last_and_least_recently_used_first() -> None:
    allocator = BlockAllocator(4)
    first, second, third, fourth = (allocator.allocate() for _ in range(4))
    for block in (second, first, third):
        allocator.release(block, keep=True)
    allocator.release(fourth, keep=False)
    allocator.share(second)
    allocator.release(second, keep=True)
    assert [allocator.allocate() for _ in range(4)] == [fourth, first, third, second]


def test_cached_blocks_can_be_freed_all_at_once() -> None:
    allocator = BlockAllocator(3)
    block = allocator.allocate()
    allocator.release(block, keep=True)
    assert (allocator.num_cached, allocator.num_available) == (1, 3)
    allocator.free_cached()
    assert (allocator.num_cached, allocator.num_available) == (0, 3)


class AllocatorModel(RuleBasedStateMachine):
    """The allocator against a plain count of references."""

    @initialize(num_blocks=st.integers(1, 6))
    def start(self, num_blocks: int) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.references: Counter[int] = Counter()
        self.cached: list[int] = []

    def used(self) -> list[int]:
        return sorted(block for block, count in self.references.items() if count)

    @precondition(lambda self: self.allocator.num_available)
    @rule()
    def allocate(self) -> None:
        num_free = self.allocator.num_available - len(self.cached)
        block = self.allocator.allocate()
        assert not self.references[block]
        if num_free:
            assert block not in self.cached
        else:
            assert block == self.cached.pop(0)
        self.references[block] = 1

    @precondition(lambda self: self.used() or self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.used() + self.cached))
        self.allocator.share(block)
        self.references[block] += 1
        if block in self.cached:
            self.cached.remove(block)

    @precondition(lambda self: self.used())
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        block = data.draw(st.sampled_from(self.used()))
        self.allocator.release(block, keep=keep)
        self.references[block] -= 1
        if keep and not self.references[block]:
            self.cached.append(block)

    @rule()
    def free_cached(self) -> None:
        self.allocator.free_cached()
        self.cached = []

    @invariant()
    def counts_agree(self) -> None:
        assert self.allocator.num_used == len(self.used())
        assert self.allocator.num_cached == len(self.cached)
        assert self.allocator.num_used + self.allocator.num_available == self.allocator.num_blocks
        for block in range(1, self.allocator.num_blocks + 1):
            assert self.allocator.is_used(block) == (self.references[block] > 0)


TestAllocatorModel = AllocatorModel.TestCase
TestAllocatorModel.settings = settings(max_examples=50, deadline=None, database=None, derandomize=True)
