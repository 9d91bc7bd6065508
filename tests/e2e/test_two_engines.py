"""One gateway in front of two engines that routes each request to the engine which has its prefix."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as rpc
from tokenizers import Tokenizer

from tests.e2e.harness import HTTP, Server
from tests.ports import free_port
from tests.waiting import PATIENCE, until

BLOCK = 16
FLAGS = ("--max-total-tokens", "2048", "--max-num-seqs", "16")
POLICY = ("--policy", "cache_aware", "--worker-warmup-secs", "0", "--worker-warmup-thin-ratio", "0")


class Gateway:
    """An SMG of our own before several engines."""

    def __init__(self, engines: list[str], log: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "smg", "launch", "--backend", "tokenspeed", "--worker-urls", *engines]
        command += ["--host", "127.0.0.1", "--port", self.url.rsplit(":", 1)[1], *POLICY]
        self.metrics_port = free_port()
        command += ["--prometheus-port", str(self.metrics_port)]
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def until_ready(self, engines: int) -> Gateway:
        until(lambda: self.has_healthy(engines), lambda: self.log.read_text()[-3000:])
        return self

    def has_healthy(self, engines: int) -> bool:
        try:
            workers = HTTP.get(f"{self.url}/workers", timeout=PATIENCE).json()["workers"]
            ready = HTTP.get(f"{self.url}/readiness", timeout=PATIENCE).status_code == 200
        except (httpx.HTTPError, ValueError, KeyError):
            return False
        return ready and len(workers) == engines and all(worker["is_healthy"] for worker in workers)

    @property
    def blocks_told(self) -> float:
        """Cached blocks that the engines have told it of so far."""
        lines = HTTP.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=PATIENCE).text.splitlines()
        told = [line for line in lines if line.startswith("smg_kv_event_blocks_total{") and 'op="stored"' in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in told)

    def complete(self, prompt: str) -> None:
        model = HTTP.get(f"{self.url}/v1/models", timeout=PATIENCE).json()["data"][0]["id"]
        body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
        reply = HTTP.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE)
        assert reply.status_code == 200, reply.text

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("engines")
    servers = [
        Server(str(tiny_model), *FLAGS, overlay=folder / f"overlay{i}", log=folder / f"log{i}") for i in range(2)
    ]
    for server in servers:
        server.launch()
    try:
        for server in servers:
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="module")
def gateway(engines: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    gateway = Gateway([address(engine) for engine in engines], tmp_path_factory.mktemp("gateway") / "log")
    try:
        yield gateway.until_ready(2)
    finally:
        gateway.stop()


def address(engine: Server) -> str:
    url: str = HTTP.get(f"{engine.url}/workers", timeout=PATIENCE).json()["workers"][0]["url"]
    return url


def prompts(engine: Server) -> float:
    return engine.metric("vllm:prompt_tokens_total")


def text(topic: str) -> str:
    return " ".join(f"{topic} number {index} is here." for index in range(20))


@asynccontextmanager
async def scheduler(engine: Server) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address(engine).removeprefix("grpc://")) as channel:
        yield rpc.TokenSpeedSchedulerStub(channel)


async def generate(stub: Any, prompt: list[int], new: int = 1) -> pb.GenerateComplete:
    sampling = pb.SamplingParams(max_new_tokens=new, temperature=0, ignore_eos=True)
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=prompt), sampling_params=sampling)
    (complete,) = [reply.complete async for reply in stub.Generate(request)]
    return complete


class Reader:
    """Applies a stream of batches as a gateway does: what is cached, by hash, and how it got there."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.sequence = 0
        self.batches: list[common.KvEventBatch] = []
        self.loads: list[common.EngineLoad] = []
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.clears = 0

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await self.take()

    async def take(self) -> None:
        batch = await self.call.read()
        self.loads.append(batch.load)
        if batch.load.load_only:
            assert not batch.events
            assert batch.sequence_number == self.sequence
            return
        assert not self.batches or batch.sequence_number == self.sequence + 1, "nothing is missing"
        self.sequence = batch.sequence_number
        self.batches.append(batch)
        for event in batch.events:
            self.apply(event)

    def apply(self, event: common.KvCacheEvent) -> None:
        if event.HasField("cleared"):
            self.blocks.clear()
            self.clears += 1
        elif event.HasField("removed"):
            for removed in event.removed.block_hashes:
                del self.blocks[removed]
        else:
            parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
            assert parent is None or parent in self.blocks
            for block in event.stored.blocks:
                assert block.block_size == len(block.token_ids) == BLOCK
                assert block.block_hash not in self.blocks
                self.blocks[block.block_hash] = parent, list(block.token_ids)
                parent = block.block_hash

    def chains(self) -> list[list[int]]:
        """The token sequences that are cached as a whole."""
        parents = {parent for parent, _ in self.blocks.values()}
        return sorted(self.chain(block) for block in self.blocks if block not in parents)

    def chain(self, block: int | None) -> list[int]:
        if block is None:
            return []
        parent, ids = self.blocks[block]
        return self.chain(parent) + ids


def test_requests_go_to_the_engine_that_has_their_prefix(engines: list[Server], gateway: Gateway) -> None:
    owners: dict[str, int] = {}
    while len(owners) < 6 or set(owners.values()) != {0, 1}:
        assert len(owners) < 40, "one engine got all"
        topic, told = f"Topic {len(owners)}", gateway.blocks_told
        before = [prompts(engine) for engine in engines]
        gateway.complete(text(topic))
        after = [prompts(engine) for engine in engines]
        (owners[topic],) = [index for index in range(2) if after[index] > before[index]]
        until(lambda told=told: gateway.blocks_told > told)
    hits = [engine.metric("vllm:prefix_cache_hits_total") for engine in engines]
    for turn in range(2):
        for topic, owner in owners.items():
            before = [prompts(engine) for engine in engines]
            gateway.complete(f"{text(topic)} And {turn}?")
            after = [prompts(engine) for engine in engines]
            assert [now > then for now, then in zip(after, before, strict=True)] == [owner == 0, owner == 1], topic
    found = sum(engine.metric("vllm:prefix_cache_hits_total") for engine in engines) - sum(hits)
    assert found > 100 * 2 * len(owners)


async def test_what_an_engine_computed_for_others_counts_too(
    engines: list[Server], gateway: Gateway, tiny_model: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    for index, topic in enumerate(["Moon", "Sun", "Star", "Rock"]):
        owner, told = index % 2, gateway.blocks_told
        async with scheduler(engines[owner]) as stub:
            await generate(stub, tokenizer.encode(text(topic)).ids)
        until(lambda told=told: gateway.blocks_told > told)
        before = [prompts(engine) for engine in engines]
        gateway.complete(f"{text(topic)} And then?")
        after = [prompts(engine) for engine in engines]
        assert [now > then for now, then in zip(after, before, strict=True)] == [owner == 0, owner == 1], topic


async def test_events_tell_what_is_cached(engines: list[Server]) -> None:
    async with scheduler(engines[0]) as stub:
        await stub.FlushCache(common.FlushCacheRequest())
        first, second = list(range(100, 170)), [*range(100, 132), *range(300, 330)]
        await generate(stub, first)
        reader = Reader(stub.SubscribeKvEvents(common.SubscribeKvEventsRequest()))
        await reader.until(lambda: reader.batches)
        assert reader.chains() == [first[:64]], "the snapshot"
        assert (reader.batches[0].snapshot.count, reader.batches[0].snapshot.blocks) == (1, 4)

        await generate(stub, second)
        await reader.until(lambda: len(reader.blocks) > 4)
        assert reader.chains() == sorted([first[:64], second[:48]])

        late = Reader(stub.SubscribeKvEvents(common.SubscribeKvEventsRequest()))
        await late.until(lambda: late.batches)
        assert late.blocks == reader.blocks

        clears = reader.clears
        assert (await stub.FlushCache(common.FlushCacheRequest())).success
        await reader.until(lambda: reader.clears > clears)
        assert not reader.blocks
        await generate(stub, first)
        await reader.until(lambda: reader.blocks)
        assert reader.chains() == [first[:64]]


async def test_what_is_pushed_out_is_removed(engines: list[Server]) -> None:
    async with scheduler(engines[0]) as stub:
        reader = Reader(stub.SubscribeKvEvents(common.SubscribeKvEventsRequest()))
        await reader.until(lambda: reader.batches)
        for start in range(0, 6000, 400):
            await generate(stub, list(range(start, start + 400)))
        await reader.until(lambda: any(event.HasField("removed") for b in reader.batches for event in b.events))
        fresh = Reader(stub.SubscribeKvEvents(common.SubscribeKvEventsRequest()))
        await fresh.until(lambda: fresh.batches)
        reachable = [chain for chain in fresh.chains() if chain]
        await reader.until(lambda: all(chain in reader.chains() for chain in reachable))
        assert len(fresh.blocks) <= 128
        cached = await generate(stub, reachable[0] + [1])
        assert cached.cached_tokens == len(reachable[0])


async def test_a_reload_clears(engines: list[Server]) -> None:
    engine = engines[0]
    async with scheduler(engine) as stub:
        await generate(stub, list(range(50)))
        reader = Reader(stub.SubscribeKvEvents(common.SubscribeKvEventsRequest()))
        await reader.until(lambda: reader.blocks)
        clears = reader.clears
        engine.edit("tokenspeed.runtime.sampling.sampler", lambda source: source + "\n\nEDITED = 1\n")
        assert (await asyncio.to_thread(engine.reload))["success"]
        await reader.until(lambda: reader.clears > clears)
        assert not reader.blocks


async def test_loads_come_with_the_events_and_alone(engines: list[Server]) -> None:
    async with scheduler(engines[0]) as stub:
        request = common.SubscribeKvEventsRequest(load_records_before_first_batch=True)
        reader = Reader(stub.SubscribeKvEvents(request))
        await reader.until(lambda: reader.batches)
        answers = [asyncio.create_task(generate(stub, list(range(i, i + 20)), 400)) for i in range(3)]
        await reader.until(lambda: reader.loads[-1].running_requests == 3)
        await asyncio.gather(*answers)
        await reader.until(lambda: reader.loads[-1].running_requests == 0 and reader.loads[-1].load_only)
        samples = [load.sample for load in reader.loads]
        assert samples == list(range(1, len(samples) + 1))
        assert reader.loads[-1].max_running_requests == 16
        assert reader.loads[-1].engine_reports_steps
        assert not reader.loads[-1].HasField("engine_silence_ms")


async def test_a_number_from_before_is_out_of_range(engines: list[Server]) -> None:
    async with scheduler(engines[0]) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=7)).read()
        assert caught.value.code() == grpc.StatusCode.OUT_OF_RANGE
