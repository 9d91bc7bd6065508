"""Captured steps on a GPU: what they compute, what they are made of, and what a generation costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import InProcessEngine
from tokenspeed.runtime.config import CacheOptions, GraphOptions, SchedulerOptions, ServeOptions
from tokenspeed.runtime.execution.executor import Executor
from tokenspeed.runtime.execution.inputs import StepShape
from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.runtime.scheduler.batch import Batch, Row
from tokenspeed.runtime.scheduler.request import Request

SMALL: dict[str, Any] = {
    "scheduler": SchedulerOptions(max_num_seqs=24, max_num_batched_tokens=256),
    "cache": CacheOptions(max_total_tokens=24 * 2048),
}
PROMPTS = [[(7 * i + 3 * j) % 997 + 1 for j in range(5 + 9 * i)] for i in range(12)]


@pytest.fixture(scope="module")
def engine(start: Callable[..., InProcessEngine], tiny: Callable[..., Path]) -> InProcessEngine:
    """In float32, where the products of different batch sizes differ too little to choose another token."""
    return start(tiny(dtype="float32"), **SMALL, model_options={"max_model_len": 512})


def silent(_: str) -> None:
    pass


def decode_batch(rows: int, block_size: int) -> Batch:
    """Rows at different positions, in blocks of their own: what is written does not depend on an order."""
    made = []
    for index in range(rows):
        request = Request(str(index), [1], SamplingParams(max_new_tokens=1, temperature=0.0))
        blocks = list(range(1 + index * 3, 4 + index * 3))
        made.append(Row(request, 2 * block_size - index, 1, True, [index + 5], None, blocks, ()))
    return Batch(made, rows, rows, rows)


def prefill_batch(tokens: int, block_size: int) -> Batch:
    """Two prompts."""
    made = []
    for index, count in enumerate((tokens // 3, tokens - tokens // 3)):
        ids = [(7 * i + index) % 900 + 1 for i in range(count)]
        request = Request(str(index), ids, SamplingParams(max_new_tokens=1, temperature=0.0))
        blocks = list(range(1 + index * 100, 2 + index * 100 + count // block_size))
        made.append(Row(request, 0, count, True, ids, None, blocks, ()))
    return Batch(made, tokens, 0, 2)


def eager_logits(executor: Executor, size: int) -> torch.Tensor:
    """Logits of the decode batch with the shapes of the graph, which is left ready for a replay."""
    shape = StepShape(size, size, 1, executor.buffers.limits.max_blocks_per_row)
    with torch.inference_mode():
        inputs = executor.buffers.fill(decode_batch(size, executor.buffers.block_size), shape)
        return executor.model.compute_logits(executor._forward(shape, inputs)).float()


def test_the_planned_graphs_exist(engine: InProcessEngine) -> None:
    generation = engine.executor.generation
    assert tuple(generation.decode) == (1, 2, 4, 8, 16, 24)
    assert tuple(generation.prefill) == (16, 32, 64, 96, 128, 192, 256)
    assert engine.startup.info().kernels_compiled >= 0


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
            inputs = executor.buffers.fill(prefill_batch(bucket, executor.buffers.block_size), shape)
            expected = executor._forward(shape, inputs).clone()
            executor.hidden.zero_()
            graph.replay()
        assert torch.equal(executor.hidden[:bucket], expected), f"prefill {bucket}"


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "top_k": 50}])
def test_answers_are_those_of_an_engine_without_graphs(
    engine: InProcessEngine, start: Callable[..., InProcessEngine], tiny: Callable[..., Path], sampling: dict[str, Any]
) -> None:
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, seed=5, **sampling)
    eager = start(tiny(dtype="float32"), **SMALL, graphs=GraphOptions(enforce_eager=True))
    captured = engine.generate(PROMPTS, params)
    assert captured == eager.generate(PROMPTS, params)
    assert all(len(answer) == 20 for answer in captured)


def test_ranges_for_a_profiler_change_nothing(
    engine: InProcessEngine, start: Callable[..., InProcessEngine], tiny: Callable[..., Path]
) -> None:
    params = SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=0.0)
    ranged = start(tiny(dtype="float32"), **SMALL, serve=ServeOptions(nvtx=True))
    assert ranged.generate(PROMPTS, params) == engine.generate(PROMPTS, params)


def test_the_side_table_names_every_kernel(engine: InProcessEngine) -> None:
    counts = set()
    for graph in engine.executor.generation.decode.values():
        triton = [node for node in graph.nodes if node.specialisation is not None]
        counts.add(len(triton))
        assert graph.num_nodes > len(triton) > 4 * len(engine.executor.pool.layers)
        assert all(node.name and node.function is not None for node in triton)
        launches = [node for node in graph.raw_nodes if node.function is not None]
        assert len(graph.nodes) == graph.num_nodes >= len(launches) > len(triton)
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
