"""Captured steps on a GPU: what they compute, what they are made of, and what a generation costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import InProcessEngine
from tokenspeed.runtime.config import CacheOptions, GraphOptions, SchedulerOptions
from tokenspeed.runtime.execution.executor import Executor
from tokenspeed.runtime.execution.inputs import StepShape
from tokenspeed.runtime.protocol import SamplingParams

SMALL: dict[str, Any] = {
    "scheduler": SchedulerOptions(max_num_seqs=24, max_num_batched_tokens=256),
    "cache": CacheOptions(max_total_tokens=24 * 2048),
}
PROMPTS = [[(7 * i + 3 * j) % 997 + 1 for j in range(5 + 9 * i)] for i in range(12)]


@pytest.fixture(scope="module")
def engine(start: Callable[..., InProcessEngine], tiny: Callable[..., Path]) -> InProcessEngine:
    return start(tiny(), **SMALL)


def silent(_: str) -> None:
    pass


def eager_logits(executor: Executor, size: int) -> torch.Tensor:
    shape = StepShape(size, size, 1, executor.buffers.limits.max_blocks_per_row)
    with torch.inference_mode():
        executor.buffers.fill_dummy(shape)
        return executor.model.compute_logits(executor._forward(shape, executor.buffers.inputs(shape)))


def test_the_planned_graphs_exist(engine: InProcessEngine) -> None:
    generation = engine.executor.generation
    assert tuple(generation.decode) == (1, 2, 4, 8, 16, 24)
    assert tuple(generation.prefill) == (16, 32, 64, 96, 128, 192, 256)


def test_a_replay_gives_the_bits_of_the_eager_step(engine: InProcessEngine) -> None:
    executor = engine.executor
    for size, graph in executor.generation.decode.items():
        expected = eager_logits(executor, size)
        executor.logits.zero_()
        graph.replay()
        assert torch.equal(executor.logits[:size], expected), f"decode {size}"
        assert executor.buffers.sampled[:size].tolist() == expected.argmax(-1).tolist()
    for bucket, graph in executor.generation.prefill.items():
        limits = executor.buffers.limits
        shape = StepShape(bucket, limits.max_rows, bucket, limits.max_blocks_per_row)
        with torch.inference_mode():
            executor.buffers.fill_dummy(shape)
            expected = executor._forward(shape, executor.buffers.inputs(shape)).clone()
            executor.hidden.zero_()
            graph.replay()
        assert torch.equal(executor.hidden[:bucket], expected), f"prefill {bucket}"


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "top_k": 50}])
def test_answers_are_those_of_an_engine_without_graphs(
    start: Callable[..., InProcessEngine], tiny: Callable[..., Path], sampling: dict[str, Any]
) -> None:
    """In float32, where the products of different batch sizes differ too little to choose another token."""
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, seed=5, **sampling)
    captured = start(tiny(dtype="float32"), **SMALL).generate(PROMPTS, params)
    eager = start(tiny(dtype="float32"), **SMALL, graphs=GraphOptions(enforce_eager=True)).generate(PROMPTS, params)
    assert captured == eager
    assert all(len(answer) == 20 for answer in captured)


def test_the_side_table_names_every_kernel(engine: InProcessEngine) -> None:
    counts = set()
    for graph in engine.executor.generation.decode.values():
        triton = [node for node in graph.nodes if node.specialisation is not None]
        counts.add(len(triton))
        assert graph.num_nodes > len(triton) > 4 * len(engine.executor.pool.layers)
        assert all(node.name and node.function is not None for node in triton)
        assert len(graph.kernel_nodes) == sum(node.name not in ("memcpy", "memset", "empty") for node in graph.nodes)
    assert len(counts) <= 2, "graphs of one step differ in the kernels that they launch"


def test_generations_share_their_memory_and_replay_alternately(engine: InProcessEngine) -> None:
    executor = engine.executor
    expected = {size: eager_logits(executor, size) for size in executor.generation.decode}
    second = executor.capture(1, silent)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    free = torch.cuda.mem_get_info()[0]
    for number in range(2, 6):
        third = executor.capture(number, silent)
        for size, wanted in expected.items():
            for generation in (executor.generation, third, second):
                eager_logits(executor, size)
                generation.decode[size].replay()
                assert torch.equal(executor.logits[:size], wanted)
        executor.synchronize()
        del third
    assert torch.cuda.memory_reserved() - reserved <= 2 << 20
    assert free - torch.cuda.mem_get_info()[0] <= 64 << 20
    executor.install(second)
    assert engine.generate(PROMPTS[:2], SamplingParams(max_new_tokens=4, temperature=0.0))


class Reads:
    """A model that reads a tensor on the host: it runs, and cannot be captured."""

    def __init__(self, model: Any):
        self.model = model
        self.compute_logits = model.compute_logits

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, ctx: Any) -> torch.Tensor:
        assert int(ids.sum()) >= 0
        return self.model(ids, positions, ctx)


class Raises(Reads):
    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, ctx: Any) -> torch.Tensor:
        self.model(ids, positions, ctx)
        raise ValueError("half way")


@pytest.mark.parametrize("broken", [Reads, Raises])
def test_a_step_that_cannot_be_captured_harms_nothing(engine: InProcessEngine, broken: type[Reads]) -> None:
    executor = engine.executor
    params = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
    before = engine.generate(PROMPTS, params)
    model = executor.model
    for _ in range(2):
        executor.model = broken(model)  # type: ignore[assignment]
        with pytest.raises((RuntimeError, ValueError)):
            executor.capture(1, silent)
        executor.model = model
        assert engine.generate(PROMPTS, params) == before
    executor.install(executor.capture(2, silent))
    assert engine.generate(PROMPTS, params) == before
