"""Random programs of ATen ops and launches: replay equals eager, whatever the inputs hold."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenspeed.runtime.execution.graphs.cpu import CpuGraphBackend
from tokenspeed_kernel.launch import launch


def _double_through_numpy(x: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    out.numpy()[...] = x.numpy() * 2
    return out


def _split_kernel(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + y.sum(), x


# Each takes any two float tensors and gives one of any shape; the values stay bounded.
UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.tanh,
    lambda x: x.reshape(-1),
    lambda x: x.flatten().unsqueeze(0),
    lambda x: x.squeeze().clone(),
    lambda x: x.transpose(0, -1),
    lambda x: x.transpose(0, -1).contiguous(),
    lambda x: x.chunk(2, dim=0)[-1],
    lambda x: x.flatten().softmax(-1),
    lambda x: x.sort(dim=0, descending=True)[0],
    lambda x: x.argsort(dim=-1, stable=True).float().tanh(),
    lambda x: x.max(dim=0, keepdim=True).values,
    lambda x: x.clone().mul_(0.5),
    lambda x: x.masked_fill(x > 0, 0.25),
    lambda x: x.bfloat16().float(),
    lambda x: F.silu(x).detach(),
    lambda x: x.flatten()[:3],
    lambda x: x.flip(0),
    lambda x: torch.tensor([0.5]).add_(x.flatten()[0]),
    lambda x: launch("double", _double_through_numpy, x).tanh(),
    lambda x: x.to(torch.float32),
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: (x + y.flatten()[0]).tanh(),
    lambda x, y: torch.cat([x.flatten(), y.flatten()])[:16],
    lambda x, y: torch.where(x > y.flatten()[0], x, torch.zeros_like(x)),
    lambda x, y: x.mul_(y.flatten()[-1].clone()).clamp_(-2, 2),
    lambda x, y: torch.outer(x.flatten()[:4], y.flatten()[:4]).tanh(),
    lambda x, y: x.flatten().index_copy(0, torch.arange(1), y.flatten()[:1]),
    lambda x, y: launch("split", _split_kernel, x, y)[0].tanh(),
    lambda x, y: launch("split", _split_kernel, x, y=y)[1],
    lambda x, y: torch.stack([x.flatten()[:1], y.flatten()[:1]]),
]
Step = tuple[int, int, int]
instructions = st.lists(
    st.tuples(st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 99), st.integers(0, 99)),
    min_size=1,
    max_size=14,
)


def run(program: list[Step], static: list[Tensor], out: Tensor) -> None:
    pool = list(static)
    for operation, first, second in program:
        x, y = pool[first % len(pool)], pool[second % len(pool)]
        if operation < len(UNARY):
            pool.append(UNARY[operation](x))
        else:
            pool.append(BINARY[operation - len(UNARY)](x, y))
    out.copy_(torch.stack([value.float().mean() for value in pool]))


@settings(max_examples=150, deadline=None)
@given(program=instructions, seed=st.integers(0, 2**31))
def test_replay_equals_eager(program: list[Step], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    static = [torch.randn(4, 4, generator=generator), torch.randn(6, generator=generator)]
    out = torch.zeros(len(static) + len(program))
    graph = CpuGraphBackend([__name__]).capture(lambda: run(program, static, out), label="random")
    for _ in range(2):
        fresh = [torch.randn(value.shape, generator=generator) for value in static]
        expected_static, expected = [value.clone() for value in fresh], torch.zeros_like(out)
        with torch.inference_mode():
            run(program, expected_static, expected)
        for value, source in zip(static, fresh, strict=True):
            value.copy_(source)
        graph.replay()
        assert torch.equal(out, expected)
        assert all(map(torch.equal, static, expected_static))
