"""How cache events are numbered, cut and handed to subscribers."""

from __future__ import annotations

import pytest

from tokenspeed.runtime.protocol.cache import BlocksRemoved, BlocksStored, CachedBlock, CacheEvents, CacheSnapshot
from tokenspeed.runtime.protocol.calls import ToEngine, UnwatchCache, WatchCache
from tokenspeed.server.cache_events import BLOCKS_IN_BATCH, MOST_BLOCKS_WAITING, Batch, CacheEventHub, Subscription
from tokenspeed.server.errors import EngineUnavailable, SubscriberTooSlow


def run(first: int, count: int, parent: int | None = None) -> BlocksStored:
    blocks = [CachedBlock(block_hash=number, token_ids=[number]) for number in range(first, first + count)]
    return BlocksStored(parent=parent, blocks=blocks)


async def read(subscription: Subscription) -> list[Batch]:
    batches = []
    while (batch := await subscription.next(0.01)) is not None:
        batches.append(batch)
    return batches


async def test_the_engine_is_asked_by_the_first_and_told_off_by_the_last() -> None:
    sent: list[ToEngine] = []
    hub = CacheEventHub(sent.append)
    first, second = hub.subscribe(), hub.subscribe()
    assert sent == [WatchCache(watch=1), WatchCache(watch=2)]
    hub.leave(first)
    assert len(sent) == 2
    hub.leave(second)
    assert sent[2:] == [UnwatchCache()]


async def test_a_subscriber_sees_its_snapshot_and_what_comes_after_it() -> None:
    hub = CacheEventHub(lambda _: None)
    first = hub.subscribe()
    hub.take_events(CacheEvents(events=[run(1, 1)]))
    hub.take_snapshot(CacheSnapshot(watch=first.watch, stored=[run(1, 1)]))
    second = hub.subscribe()
    hub.take_events(CacheEvents(events=[run(2, 1, 1)]))
    hub.take_snapshot(CacheSnapshot(watch=second.watch, stored=[run(1, 2)]))
    hub.take_events(CacheEvents(events=[BlocksRemoved(hashes=[2])]))
    seen = [await read(first), await read(second)]
    assert [batch.snapshot is not None for batch in seen[0]] == [True, False, False]
    assert [batch.snapshot is not None for batch in seen[1]] == [True, False]
    for batches in seen:
        start = batches[0].sequence
        assert [batch.sequence for batch in batches] == list(range(start, start + len(batches)))
    assert seen[0][-1].sequence == seen[1][-1].sequence


async def test_an_empty_snapshot_is_a_batch_that_clears() -> None:
    hub = CacheEventHub(lambda _: None)
    subscription = hub.subscribe()
    hub.take_snapshot(CacheSnapshot(watch=subscription.watch, stored=[]))
    (batch,) = await read(subscription)
    assert [event.WhichOneof("data") for event in batch.events] == ["cleared"]
    assert batch.snapshot is not None
    assert (batch.snapshot.index, batch.snapshot.count, batch.snapshot.blocks) == (0, 1, 0)


@pytest.mark.parametrize("lengths", [[BLOCKS_IN_BATCH], [BLOCKS_IN_BATCH * 2 + 7], [3, BLOCKS_IN_BATCH, 1], [1] * 5000])
async def test_a_large_snapshot_comes_in_parts(lengths: list[int]) -> None:
    hub = CacheEventHub(lambda _: None)
    subscription = hub.subscribe()
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    stored = [run(start, length) for start, length in zip(starts, lengths, strict=True)]
    hub.take_snapshot(CacheSnapshot(watch=subscription.watch, stored=stored))
    hub.take_events(CacheEvents(events=[run(10**6, 1)]))
    *parts, live = await read(subscription)
    assert [part.snapshot.index for part in parts if part.snapshot] == list(range(len(parts)))
    assert {part.snapshot.count for part in parts if part.snapshot} == {len(parts)}
    assert [part.sequence for part in (*parts, live)] == list(range(live.sequence - len(parts), live.sequence + 1))
    hashes = []
    for part in parts:
        assert part.blocks <= BLOCKS_IN_BATCH
        for event in part.events:
            if event.HasField("stored"):
                blocks = [block.block_hash for block in event.stored.blocks]
                if blocks[0] not in starts:
                    assert event.stored.parent_block_hash == blocks[0] - 1, "a run that was cut goes on"
                hashes += blocks
    assert hashes == list(range(sum(lengths)))


async def test_who_does_not_read_is_ended_and_nobody_else() -> None:
    hub = CacheEventHub(lambda _: None)
    slow, quick = hub.subscribe(), hub.subscribe()
    for subscription in (slow, quick):
        hub.take_snapshot(CacheSnapshot(watch=subscription.watch, stored=[]))
    for number in range(MOST_BLOCKS_WAITING // 1000 + 2):
        hub.take_events(CacheEvents(events=[run(number * 1000, 1000)]))
        await read(quick)
    with pytest.raises(SubscriberTooSlow):
        await slow.next(0.01)
    hub.take_events(CacheEvents(events=[run(1, 1)]))
    assert len(await read(quick)) == 1
    assert slow.num_waiting == 0


async def test_all_end_with_the_engine() -> None:
    hub = CacheEventHub(lambda _: None)
    subscription = hub.subscribe()
    hub.fail(EngineUnavailable("gone"))
    with pytest.raises(EngineUnavailable, match="gone"):
        await subscription.next(1)
