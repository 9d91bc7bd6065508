"""KV cache events: what the engine's prefix index holds, for gateways that route by it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

from smg_grpc_proto.generated import common_pb2 as common

from tokenspeed.runtime.protocol.cache import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    CacheEvents,
    CacheSnapshot,
)
from tokenspeed.runtime.protocol.calls import ToEngine, UnwatchCache, WatchCache
from tokenspeed.server.errors import EngineUnavailable, SubscriberTooSlow
from tokenspeed.server.load_record import TICK, LoadRecords

MOST_BLOCKS_WAITING = 100_000
"""A subscriber that leaves more blocks unread than this is ended; it may subscribe again and gets a snapshot."""

BLOCKS_IN_BATCH = 2000
"""Of a snapshot, so that its messages stay small."""

FIRST_SEQUENCE = 1 << 32
"""The batches of a snapshot have the numbers before that of the moment it was taken, and there must be some."""


@dataclass
class Batch:
    """One message to a subscriber, but for the load."""

    sequence: int
    events: list[common.KvCacheEvent]
    blocks: int
    snapshot: common.KvSnapshotChunk | None = None
    timestamp: float = 0.0


class Subscription:
    """One subscriber's batches: first a snapshot, then every change after it."""

    def __init__(self, watch: int) -> None:
        self.watch = watch
        self.live = False
        self._batches: deque[Batch] = deque()
        self._blocks = 0
        self._failure: EngineUnavailable | SubscriberTooSlow | None = None
        self._news = asyncio.Event()

    def put(self, batch: Batch, most_blocks: int | None = None) -> None:
        """Add a batch; with a bound for what is unread, the subscriber fails instead."""
        if self._failure is not None:
            return
        if most_blocks is not None and self._blocks + batch.blocks > most_blocks:
            self.fail(SubscriberTooSlow(f"more than {most_blocks} blocks of events wait to be read; subscribe again"))
            return
        self._batches.append(batch)
        self._blocks += batch.blocks
        self._news.set()

    @property
    def num_waiting(self) -> int:
        """Batches that wait to be read."""
        return len(self._batches)

    def fail(self, error: EngineUnavailable | SubscriberTooSlow) -> None:
        """Make the reader raise `error`."""
        self._batches.clear()
        self._failure = error
        self._news.set()

    async def next(self, seconds: float) -> Batch | None:
        """The next batch, or None when none comes in time.

        Raises:
            SubscriberTooSlow: when too much waits to be read.
            EngineUnavailable: when the engine is lost or stops.
        """
        if not self._batches and self._failure is None:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), seconds)
            except TimeoutError:
                return None
        if self._failure is not None:
            raise self._failure
        batch = self._batches.popleft()
        self._blocks -= batch.blocks
        return batch


class CacheEventHub:
    """Numbers the engine's cache events and hands them to the subscribers.

    The engine tells them only while there are some. Nothing is kept for later: each subscriber begins with a
    snapshot, and one that asks for anything older has to begin anew.
    """

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self._send = send
        self._watches = itertools.count(1)
        self._event_ids = itertools.count(1)
        self._sequence = FIRST_SEQUENCE
        self._subscriptions: set[Subscription] = set()
        self.block_size = 0

    def subscribe(self) -> Subscription:
        """A new subscriber, who gets a snapshot as soon as the engine has told it."""
        subscription = Subscription(next(self._watches))
        self._subscriptions.add(subscription)
        self._send(WatchCache(watch=subscription.watch))
        return subscription

    def leave(self, subscription: Subscription) -> None:
        """The subscriber is gone."""
        self._subscriptions.discard(subscription)
        if not self._subscriptions:
            self._send(UnwatchCache())

    def take_snapshot(self, message: CacheSnapshot) -> None:
        """Give a snapshot to the subscriber who waits for it."""
        for subscription in self._subscriptions:
            if subscription.watch == message.watch:
                subscription.live = True
                for batch in self._snapshot_batches(message.stored):
                    subscription.put(batch)

    def take_events(self, message: CacheEvents) -> None:
        """Give events to all who had their snapshot."""
        self._sequence += 1
        events = [self._proto(event) for event in message.events]
        blocks = sum(_num_blocks(event) for event in message.events)
        batch = Batch(self._sequence, events, blocks, timestamp=time.time())
        for subscription in self._subscriptions:
            if subscription.live:
                subscription.put(batch, MOST_BLOCKS_WAITING)

    def begin_again(self) -> None:
        """Other ranks serve from here on, whose cache is empty. They must get this before any request."""
        if any(subscription.live for subscription in self._subscriptions):
            self.take_events(CacheEvents(events=[CacheCleared()]))
            self._send(WatchCache(watch=next(self._watches)))
        for subscription in self._subscriptions:
            if not subscription.live:
                self._send(WatchCache(watch=subscription.watch))

    def fail(self, error: EngineUnavailable) -> None:
        """End all subscriptions."""
        for subscription in self._subscriptions:
            subscription.fail(error)

    def _snapshot_batches(self, stored: Sequence[BlocksStored]) -> Iterator[Batch]:
        """The batches of one snapshot, numbered so that the next live one follows the last of them."""
        parts = list(_parts(stored)) or [[]]
        total = sum(len(event.blocks) for event in stored)
        for index, part in enumerate(parts):
            events = [self._proto(event, event_id=0) for event in part]
            if index == 0:
                events.insert(0, common.KvCacheEvent(cleared=common.KvCacheCleared()))
            chunk = common.KvSnapshotChunk(index=index, count=len(parts), blocks=total)
            sequence = self._sequence - len(parts) + 1 + index
            yield Batch(sequence, events, sum(len(event.blocks) for event in part), chunk, time.time())

    def _proto(self, event: CacheEvent, event_id: int | None = None) -> common.KvCacheEvent:
        number = next(self._event_ids) if event_id is None else event_id
        match event:
            case BlocksStored():
                blocks = [
                    common.KvBlock(block_hash=b.block_hash, token_ids=b.token_ids, block_size=self.block_size)
                    for b in event.blocks
                ]
                stored = common.KvBlocksStored(blocks=blocks, parent_block_hash=event.parent)
                return common.KvCacheEvent(event_id=number, stored=stored)
            case BlocksRemoved():
                removed = common.KvBlocksRemoved(block_hashes=event.hashes)
                return common.KvCacheEvent(event_id=number, removed=removed)
            case CacheCleared():
                return common.KvCacheEvent(event_id=number, cleared=common.KvCacheCleared())


def _parts(stored: Sequence[BlocksStored]) -> Iterator[list[BlocksStored]]:
    """Lists of runs, each with at most `BLOCKS_IN_BATCH` blocks; a longer run is cut."""
    part: list[BlocksStored] = []
    room = BLOCKS_IN_BATCH
    for run in stored:
        parent, blocks = run.parent, run.blocks
        while blocks:
            taken = blocks[:room]
            part.append(BlocksStored(parent=parent, blocks=taken))
            parent, blocks, room = taken[-1].block_hash, blocks[len(taken) :], room - len(taken)
            if not room:
                yield part
                part, room = [], BLOCKS_IN_BATCH
    if part:
        yield part


def _num_blocks(event: CacheEvent) -> int:
    match event:
        case BlocksStored():
            return len(event.blocks)
        case BlocksRemoved():
            return len(event.hashes)
        case CacheCleared():
            return 1


async def batches(
    subscription: Subscription, records: LoadRecords, *, early: bool
) -> AsyncIterator[common.KvEventBatch]:
    """What a subscriber gets: its batches, each with the load, and the load alone when it changed or now and then.

    Before the first batch the load alone has the number 0, and is sent only if the subscriber wants it `early`.

    Raises:
        TokenSpeedError: when the subscription has failed.
    """
    sequence = 0
    while True:
        batch = await subscription.next(TICK)
        if batch is not None:
            sequence = batch.sequence
            yield common.KvEventBatch(
                sequence_number=sequence,
                timestamp=batch.timestamp,
                events=batch.events,
                dp_rank=0,
                snapshot=batch.snapshot,
                load=records.next(load_only=False),
            )
        elif (sequence or early) and records.due():
            load = records.next(load_only=True)
            yield common.KvEventBatch(sequence_number=sequence, timestamp=time.time(), dp_rank=0, load=load)
