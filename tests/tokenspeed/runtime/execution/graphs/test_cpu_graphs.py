"""Captured steps against eager ones: models, launches, memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.runtime.execution.graphs.cpu import CpuGraph, CpuGraphBackend
from tokenspeed_kernel.launch import launch, recording


def capture(step: Callable[[], object], packages: tuple[str, ...] = ()) -> CpuGraph:
    return CpuGraphBackend(packages).capture(step, label="test")


def assert_replays_as_eager(step: Callable[[], object], inputs: list[Tensor], outputs: list[Tensor]) -> CpuGraph:
    """Replay with three other inputs gives what the step gives, for every tensor that it writes."""
    graph = capture(step)
    for round_number in range(3):
        for tensor in inputs:
            refill(tensor, round_number)
        states = [tensor.clone() for tensor in outputs]
        with torch.inference_mode():
            step()
        expected = [tensor.clone() for tensor in outputs]
        for tensor, state in zip(outputs, states, strict=True):
            tensor.copy_(state)
        graph.replay()
        for tensor, value in zip(outputs, expected, strict=True):
            assert torch.equal(tensor, value)
    return graph


def refill(tensor: Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    if tensor.is_floating_point():
        tensor.normal_(generator=generator)
    else:
        tensor.copy_(torch.randint(0, 8, tensor.shape, generator=generator))


class Attention(torch.nn.Module):
    """Decode attention over a slotted cache, with rotary halves."""

    def __init__(self, width: int = 32, heads: int = 4, slots: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.norm = torch.nn.LayerNorm(width)
        self.keys = torch.zeros(slots, heads, width // heads)
        self.values = torch.zeros(slots, heads, width // heads)

    def forward(self, x: Tensor, slots: Tensor, tables: Tensor) -> Tensor:
        q, k, v = (t.view(len(x), self.heads, -1) for t in self.qkv(self.norm(x)).split(x.shape[-1], dim=-1))
        first, second = k.chunk(2, dim=-1)
        self.keys.index_copy_(0, slots, torch.cat((-second, first), dim=-1))
        self.values[slots] = v
        k, v = self.keys[tables].transpose(1, 2), self.values[tables].transpose(1, 2)
        attended = F.scaled_dot_product_attention(q.unsqueeze(2), k, v)
        return x + self.out(attended.transpose(1, 2).reshape(x.shape))


def test_a_model_with_a_cache_that_it_writes_in_place() -> None:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(8, 32)
    layers = [Attention() for _ in range(3)]
    ids, slots = torch.zeros(2, dtype=torch.long), torch.tensor([1, 3])
    tables = torch.zeros(2, 4, dtype=torch.long)
    logits, tokens, best = torch.zeros(2, 8), torch.zeros(2, dtype=torch.long), torch.zeros(2, 3)

    def step() -> None:
        x = embedding(ids)
        for layer in layers:
            x = layer(x, slots, tables)
        result = F.linear(x, embedding.weight)
        logits.copy_(result)
        torch.argmax(result, dim=-1, out=tokens)
        best.copy_(result.softmax(-1).sort(descending=True)[0][:, :3] + result.topk(3).values)

    caches = [cache for layer in layers for cache in (layer.keys, layer.values)]
    graph = assert_replays_as_eager(step, [ids, tables], [logits, tokens, best, *caches])
    assert {node.name for node in graph.nodes} >= {"aten.linear.default", "aten.index_copy_.default"}
    assert graph.num_nodes == len(graph.nodes)


STEPS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "inplace on a view": lambda x, i, out: out[1:3].add_(x[:2]),
    "inplace on a computed tensor": lambda x, i, out: out.copy_((x * 2).mul_(3).relu_()),
    "write through a view of a computed tensor": lambda x, i, out: write_first_row(x, out),
    "inplace view": lambda x, i, out: out.copy_((x + 1).unsqueeze_(0).squeeze_(0).t_().t()),
    "shape given by a list": lambda x, i, out: out.copy_(x.view([2, 2, 4]).permute([1, 0, 2]).reshape(4, 4)),
    "factories": lambda x, i, out: out.copy_(
        x + torch.arange(4) + torch.full((4, 1), 2.0) + torch.zeros_like(x) + x.new_ones(4)
    ),
    "constant from the host": lambda x, i, out: out.copy_(x * torch.tensor([1.0, 2.0, 3.0, 4.0])),
    "constant that is changed": lambda x, i, out: out.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]).add_(x[1])),
    "optional arguments": lambda x, i, out: out.copy_(F.layer_norm(x, [4]) + x.clamp(min=0.1)),
    "dtype arguments": lambda x, i, out: out.copy_(x.to(torch.float64).sum(0, dtype=torch.float32).expand(4, 4)),
    "no-op conversions": lambda x, i, out: out.copy_(x.to(torch.float32).contiguous()),
    "list of tensors": lambda x, i, out: out.copy_(torch.stack([x[0], x[1], out[2], x[3]])),
    "list of optional tensors": lambda x, i, out: out.copy_(x[:, i[:4]]),
    "index put with accumulate": lambda x, i, out: out.index_put_((i[:4],), x, accumulate=True),
    "several results": lambda x, i, out: out.copy_(torch.cat(x.unbind(1)).view(4, 4) + x.max(0).values),
    "unused results": lambda x, i, out: out.copy_(x.sort().indices),
    "scalar mask": lambda x, i, out: out.masked_fill_(x > 0, 1.5),
    "assignment by mask": lambda x, i, out: out.__setitem__(x > 0, 7.0),
    "where": lambda x, i, out: out.copy_(torch.where(x > 0, x, out)),
    "scatter and gather": lambda x, i, out: out.scatter_(
        1, (i[:4] % 4).expand(4, 4).contiguous(), x.gather(1, (i[:4] % 4).expand(4, 4))
    ),
    "einsum": lambda x, i, out: out.copy_(torch.einsum("ij,kj->ik", x, (i[:4, None] == torch.arange(4)).float())),
    "out variant": lambda x, i, out: torch.mul(x, 2, out=out),
    "bf16 matmul": lambda x, i, out: out.copy_(x.bfloat16() @ x.bfloat16().t()),
    "data attribute": lambda x, i, out: out.copy_((x * 2).data + 1),
    "dropout outside of training": lambda x, i, out: out.copy_(F.dropout(x, 0.5, training=False)),
    "attention with a mask": lambda x, i, out: out.copy_(
        F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=(x > 0)[None])[0].nan_to_num()
    ),
    "repeat with a known size": lambda x, i, out: out.copy_(
        torch.repeat_interleave(x[:2], torch.tensor([2, 2]), dim=0, output_size=4)
    ),
}


def write_first_row(x: Tensor, out: Tensor) -> None:
    y = x * 2
    y[0].copy_(x[3])
    out.copy_(y)


@pytest.mark.parametrize("name", STEPS)
def test_operations_replay_as_eager(name: str) -> None:
    x, i, out = torch.zeros(4, 4), torch.zeros(8, dtype=torch.long), torch.zeros(4, 4)
    refill(x, 7)
    step = STEPS[name]
    i_is_index = torch.zeros(8, dtype=torch.long)

    def run() -> None:
        i_is_index.copy_(i % 4)
        step(x, i_is_index, out)

    assert_replays_as_eager(run, [x, i], [out])


def negate_through_numpy(x: Tensor, out: Tensor) -> None:
    out.numpy()[:] = -x.numpy()


def scale_by_host_value(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x * 3


def fake_all_reduce(x: Tensor) -> Tensor:
    x.numpy()[...] *= 2
    return x


class Halves(NamedTuple):
    low: Tensor
    high: Tensor


@dataclass(frozen=True)
class Batch:
    x: Tensor
    rows: list[Tensor]
    scale: float


def halves(x: Tensor, *, dim: int) -> Halves:
    return Halves(*x.chunk(2, dim))


def of_batch(batch: Batch, extra: dict[str, Tensor]) -> Tensor:
    return batch.x * batch.scale + sum(batch.rows) + extra["bias"]


def test_a_kernel_that_writes_through_numpy() -> None:
    x, out = torch.zeros(4), torch.zeros(4)

    def step() -> None:
        scratch = torch.empty_like(x)
        launch("negate", negate_through_numpy, x + 1, scratch)
        out.copy_(scratch)

    graph = assert_replays_as_eager(step, [x], [out])
    assert [node.name for node in graph.nodes].count("negate") == 1
    assert graph.num_nodes == 4


def test_a_kernel_may_read_data_on_the_host() -> None:
    x, out = torch.zeros(4), torch.zeros(4)
    assert_replays_as_eager(lambda: out.copy_(launch("k", scale_by_host_value, x)), [x], [out])


def test_a_collective_is_one_node_and_reduces_in_place() -> None:
    x, out = torch.zeros(4), torch.zeros(4)

    def step() -> None:
        partial_sum = x + 1
        launch("all_reduce", fake_all_reduce, partial_sum)
        out.copy_(partial_sum)

    graph = assert_replays_as_eager(step, [x], [out])
    assert [(node.name, node.function) for node in graph.nodes][1] == ("all_reduce", fake_all_reduce)


def test_arguments_and_results_in_containers() -> None:
    x, bias, out = torch.zeros(4, 4), torch.zeros(4, 2), torch.zeros(4, 2)

    def step() -> None:
        result = launch("halves", halves, x * 2, dim=1)
        batch = Batch(result.low, [result.high, bias], 0.5)
        out.copy_(launch("of_batch", of_batch, batch, extra={"bias": result.high * 3}))

    assert_replays_as_eager(step, [x, bias], [out])


def test_a_launch_inside_a_kernel_is_part_of_its_node() -> None:
    x, out = torch.zeros(4), torch.zeros(4)

    def outer(value: Tensor) -> Tensor:
        return launch("inner", torch.neg, value) + 1

    graph = assert_replays_as_eager(lambda: out.copy_(launch("outer", outer, x)), [x], [out])
    assert [node.name for node in graph.nodes] == ["outer", "aten.copy_.default"]


def test_a_kernel_that_returns_memory_of_its_own() -> None:
    workspace, x, out = torch.zeros(4), torch.zeros(4), torch.zeros(4)

    def into_workspace(value: Tensor) -> Tensor:
        return workspace[:4].copy_(value)

    def step() -> None:
        result = launch("w", into_workspace, x * 2)
        workspace.add_(1)
        out.copy_(result)

    assert_replays_as_eager(step, [x], [out, workspace])


def test_a_failed_replay_leaves_the_graph_usable() -> None:
    x, out = torch.zeros(4), torch.zeros(4)

    def picky(value: Tensor) -> Tensor:
        if value.sum() < 0:
            raise ValueError("negative")
        return value * 2

    graph = capture(lambda: out.copy_(launch("picky", picky, x + 0)))
    x.fill_(-1)
    with pytest.raises(ValueError, match="negative"):
        graph.replay()
    x.fill_(1)
    graph.replay()
    assert out.tolist() == [2.0] * 4


def test_an_exception_of_the_step_passes_through_and_leaves_nothing_installed() -> None:
    x = torch.zeros(4)

    def broken(value: Tensor) -> Tensor:
        raise KeyError("broken kernel")

    with pytest.raises(KeyError, match="broken kernel") as info:
        capture(lambda: launch("broken", broken, x))
    assert [entry.name for entry in info.traceback][-1] == "broken"
    # Neither refused nor recorded any more.
    assert (x + 1).tolist() == [1.0] * 4
    assert launch("plain", lambda: 3) == 3
    assert not torch.is_inference_mode_enabled()


class Counter:
    def __init__(self) -> None:
        self.names: list[str] = []

    def launch(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names.append(name)
        return function(*args, **kwargs)


def test_a_recorder_outside_of_the_capture_is_restored() -> None:
    counter = Counter()
    with recording(counter):
        capture(lambda: launch("captured", torch.zeros, 2))
        launch("counted", torch.zeros, 2)
    assert counter.names == ["counted"]


def test_computed_tensors_die_after_their_last_use() -> None:
    x, out = torch.zeros(4), torch.zeros(4)
    alive: list[weakref.ref[Tensor]] = []
    seen: list[list[bool]] = []

    def watch(value: Tensor) -> Tensor:
        seen.append([ref() is not None for ref in alive])
        result = value * 2
        alive.append(weakref.ref(result))
        return result

    def step() -> None:
        value = x
        for _ in range(4):
            value = launch("watch", watch, value)
        out.copy_(value)

    graph = capture(step)
    alive.clear()
    seen.clear()
    graph.replay()
    # Each launch sees its input alive and nothing older.
    assert seen == [[], [True], [False, True], [False, False, True]]
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_dropped_graphs_leave_nothing_behind() -> None:
    x, out = torch.zeros(64), torch.zeros(64)

    def twice(value: Tensor) -> Tensor:
        return value * 2

    def step() -> None:
        held = torch.nn.Parameter(x)
        out.copy_(launch("twice", twice, x + 1) + held)

    def cycle() -> None:
        capture(step, (__name__,)).replay()

    def census() -> int:
        gc.collect()
        return len(gc.get_objects())

    for _ in range(3):
        cycle()

    def growth() -> int:
        before = census()
        for _ in range(50):
            cycle()
        return census() - before

    # What other threads of this process do may add objects, but not every time.
    assert any(growth() < 50 for _ in range(5))


def test_dropping_a_graph_frees_its_tensors_at_once() -> None:
    out = torch.zeros(4)

    def make() -> tuple[CpuGraph, weakref.ref[Tensor]]:
        weight = torch.ones(4)
        return capture(lambda: out.copy_(weight * 2)), weakref.ref(weight)

    gc.disable()
    try:
        graph, weight = make()
        assert weight() is not None
        graph.replay()
        del graph
        assert weight() is None
    finally:
        gc.enable()
