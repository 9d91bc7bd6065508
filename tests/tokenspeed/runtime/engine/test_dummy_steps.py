"""The dummy steps of a real engine, and plans that run again beside its KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
import torch

from tests.engine import InProcessEngine
from tests.tiny import tiny_llama
from tokenspeed.runtime.config import CacheOptions, Config, GraphOptions, ModelOptions, ReloadOptions, SchedulerOptions
from tokenspeed.runtime.execution.plans import Plans
from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.runtime.sampling.batch import SamplingBatch
from tokenspeed.runtime.sampling.sampler import Sampler
from tokenspeed_kernel.ops.attention import backends, reference
from tokenspeed_kernel.registry import REGISTRY, Kernel

PROMPTS = [[3 + i, 5, 7 * i + 1] for i in range(4)]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> InProcessEngine:
    config = Config(
        model=ModelOptions(model=str(tiny_llama(tmp_path_factory.mktemp("tiny"))), device="cpu", max_model_len=96),
        scheduler=SchedulerOptions(max_num_seqs=24, max_num_batched_tokens=48),
        cache=CacheOptions(max_total_tokens=4096, block_size=8),
        graphs=GraphOptions(cpu_graphs=True, cudagraph_capture_sizes=(1, 24), prefill_graph_max_tokens=32),
        reload=ReloadOptions(allow_reload_forward=True),
    )
    return InProcessEngine(config, tmp_path_factory.mktemp("run")).start()


def test_what_start_up_and_reloads_run_leaves_the_blocks_of_requests_alone(engine: InProcessEngine) -> None:
    executor, pool = engine.executor, engine.executor.pool
    assert len(pool.scratch) == 4
    for keys, values in pool.layers:
        keys[1 : pool.usable_blocks + 1] = 7
        values[1 : pool.usable_blocks + 1] = 7
    executor.warm(lambda _: None)
    executor.run_largest()
    executor.capture(1, lambda _: None)
    for keys, values in pool.layers:
        assert (keys[1 : pool.usable_blocks + 1] == 7).all() and (values[1 : pool.usable_blocks + 1] == 7).all()
        assert all((keys[block] != 7).any() for block in pool.scratch)


def test_each_row_of_a_dummy_step_computes_its_own_and_the_same_again(engine: InProcessEngine) -> None:
    executor = engine.executor
    graph, shape = executor.generation.decode[24], executor._decode_shape(24)
    found = []
    for fill in (0.0, 3.0):
        for keys, values in executor.pool.layers:
            keys.fill_(fill)
            values.fill_(fill)
        executor.buffers.fill_dummy(shape, executor.pool.scratch)
        graph.replay()
        found.append(executor.logits[:24].clone())
    assert torch.equal(*found)
    assert len({tuple(row) for row in found[0].tolist()}) == 24


def test_the_largest_step_samples_for_all_rows_in_every_way_that_warming_does(
    engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, sampled = engine.executor, []

    class Recorder(Sampler):
        def __call__(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
            sampled.append((len(logits), batch.greedy, batch.mask is not None, batch.logprobs is not None))
            return super().__call__(logits, batch)

    monkeypatch.setattr(executor, "sampler", Recorder())
    executor.warm(lambda _: None)
    warmed = {tuple(ways) for _, *ways in sampled}
    sampled.clear()
    executor.run_largest()
    assert {rows for rows, *_ in sampled} == {24}
    assert {tuple(ways) for _, *ways in sampled} == warmed


@pytest.fixture
def registry() -> Iterator[None]:
    before, flags = REGISTRY.snapshot(), dict(REGISTRY.overrides.flags)
    yield
    REGISTRY.restore(before)
    REGISTRY.overrides.flags = flags


@pytest.mark.parametrize(
    ("backend", "order", "why"),
    [
        ("new", "HND", "another layout of the KV cache"),
        ("new", "NHD", "another attention backend"),
        ("torch", "NHD", ""),
        ("", "NHD", ""),
    ],
)
def test_attention_for_another_layout_or_of_another_backend_is_named_and_not_taken(
    engine: InProcessEngine, registry: None, monkeypatch: pytest.MonkeyPatch, backend: str, order: str, why: str
) -> None:
    calls: list[Any] = []

    def decode(*args: Any) -> torch.Tensor:
        calls.append(args)
        return reference.decode(*args)

    plans, executor = Plans(engine.executor, engine.startup.wishes), engine.executor
    state = plans.snapshot()
    REGISTRY.register(Kernel("attention.decode.new", decode, "attention", "decode", "new", priority=99))
    known = backends.BACKENDS[backend].solutions if backend in backends.BACKENDS else ()
    more = {**backends.BACKENDS, **({backend: backends.Backend((*known, "new"), order)} if backend else {})}
    monkeypatch.setattr(backends, "BACKENDS", MappingProxyType(more))
    before = engine.generate(PROMPTS, GREEDY)
    generation = executor.generation
    try:
        refused = plans.make_anew()
        executor.install(executor.capture(1, lambda _: None))
        assert engine.generate(PROMPTS, GREEDY) == before
        assert list(refused) == (["attention.decode.new"] if why else [])
        assert why in "".join(refused.values())
        assert bool(calls) == (not why)
    finally:
        plans.restore(state)
        executor.install(generation)
