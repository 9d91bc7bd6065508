"""Compiled solutions on a GPU at the sizes of real models, against float64; memory is poisoned before each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
from triton.runtime.errors import OutOfResources

import tokenspeed_kernel.ops  # noqa: F401
from tokenspeed_kernel.ops.attention.reference import decode as decode_reference
from tokenspeed_kernel.ops.attention.reference import extend as extend_reference
from tokenspeed_kernel.ops.gemm.block_fp8 import dequantise
from tokenspeed_kernel.registry import REGISTRY, Kernel
from tokenspeed_kernel.tactics import TACTICS, Tactic
from tokenspeed_kernel.workloads import ModelShape, Workloads
from tokenspeed_kernel.workspace import WORKSPACE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SHAPES = {
    "qwen3-8b": ModelShape(4096, 32, 8, 128, 12288, 151936, 16),
    "smollm2-135m": ModelShape(576, 9, 3, 64, 1536, 49152, 16),
    "odd": ModelShape(1000, 6, 2, 80, 1111, 1013, 7),
}
ERRORS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Largest ratio of the norm of the error to the norm of the result."""

shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
dtypes = pytest.mark.parametrize("dtype", ERRORS, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(autouse=True, scope="module")
def planning() -> None:
    """An engine that ran before has fixed the workspace of this process."""
    WORKSPACE.reopen(torch.device("cuda", torch.cuda.current_device()))


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fill what `torch.empty` gives with NaN: an element that no kernel writes is seen."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def workloads(shape: ModelShape, dtype: torch.dtype) -> Workloads:
    return Workloads(shape, torch.device("cuda"), dtype)


def function(name: str) -> Callable[..., Any]:
    return REGISTRY.get(f"{name}.triton").function


def functions(name: str, dtype: torch.dtype) -> list[Callable[..., Any]]:
    """Every solution that takes `dtype` on this machine, the reference left out."""
    kernels = [kernel for kernel in REGISTRY.kernels(*name.split(".")) if kernel.solution != "reference"]
    return [kernel.function for kernel in kernels if kernel.covers(torch.device("cuda"), dtype)]


def wide(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments with every floating tensor in float64."""
    return tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments)


@contextmanager
def override_tactic(kernel: Kernel, tactic: Tactic) -> Iterator[None]:
    """Make `tactic` the default of a solution."""
    module = importlib.import_module(kernel.function.__module__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CANDIDATES", (tactic,))
        TACTICS.look_again()
        yield
    TACTICS.look_again()


def close(got: Tensor, want: Tensor) -> None:
    error = (got.double() - want).norm() / want.norm()
    assert error < ERRORS[got.dtype], f"the error is {error:.2e} of the result"


@shapes
@dtypes
@pytest.mark.parametrize("tokens", [1, 5, 256])
def test_elementwise(shape: ModelShape, dtype: torch.dtype, tokens: int) -> None:
    make = workloads(shape, dtype)
    x, residual, weight, eps = make.add_rms_norm(tokens)
    exact = (x + residual).double()
    want = exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    for add_rms_norm in functions("norm.add_rms_norm", dtype):
        out, total = add_rms_norm(x, residual, weight, eps)
        assert torch.equal(total, x + residual)
        close(out, want)
    for rms_norm in functions("norm.rms_norm", dtype):
        close(rms_norm(x + residual, weight, eps), want)
    (x,) = make.silu_and_mul(tokens)
    gate, up = x.double().chunk(2, -1)
    for silu_and_mul in functions("activation.silu_and_mul", dtype):
        close(silu_and_mul(x), gate * gate.sigmoid() * up)


@shapes
@dtypes
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("tokens", [1, 37])
def test_rope_and_write_kv(shape: ModelShape, dtype: torch.dtype, tokens: int, normalise: bool) -> None:
    arguments = workloads(shape, dtype).rope_and_write_kv(tokens, normalise)
    positions, query, key, value, cos_sin, keys, values, slots, query_weight, key_weight, eps = arguments

    def want(x: Tensor, weight: Tensor | None) -> Tensor:
        x = x.double()
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
        (first, second), (cos, sin) = x.chunk(2, -1), cos_sin[positions].double().unsqueeze(1).chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    if not normalise:
        for got, x in zip(function("rope.apply_rope")(positions, query, key, cos_sin), (query, key), strict=True):
            close(got, want(x, None))
    keys.fill_(torch.nan)
    close(function("rope.rope_and_write_kv")(*arguments), want(query, query_weight))
    close(keys.flatten(0, 1)[slots], want(key, key_weight))
    assert torch.equal(values.flatten(0, 1)[slots], value)


@shapes
@dtypes
@pytest.mark.parametrize(("seqs", "context"), [(1, 1), (1, 1000), (3, 4099), (64, 333), (256, 65)])
def test_decode(shape: ModelShape, dtype: torch.dtype, seqs: int, context: int) -> None:
    arguments = workloads(shape, dtype).decode(seqs, context, spare=9)
    lengths = arguments[4]
    lengths.copy_(torch.randint(1, context + 1, (seqs,)))
    lengths[0] = context
    close(function("attention.decode")(*arguments), decode_reference(*wide(arguments)))


@shapes
@dtypes
@pytest.mark.parametrize(("tokens", "cached"), [(1, 50), (130, 0), (777, 1001)])
def test_extend(shape: ModelShape, dtype: torch.dtype, tokens: int, cached: int) -> None:
    arguments = workloads(shape, dtype).extend(tokens, cached, spare=9)
    close(function("attention.extend")(*arguments), extend_reference(*wide(arguments)))


@dtypes
def test_extend_of_many_sequences_with_padding(dtype: torch.dtype) -> None:
    shape = SHAPES["qwen3-8b"]
    make = workloads(shape, dtype)
    news = [1, 200, 33, 1, 64, 0, 0]
    keys, values, tables, lengths = make.paged(len(news), 400)
    starts = torch.tensor([0, *news], device="cuda").cumsum(0).to(torch.int32)
    lengths.copy_(torch.tensor([300, 200, 400, 1, 90, 0, 0]))
    query, _, _ = make.qkv(320)
    arguments = query, keys, values, tables, lengths, starts, 200, 0.1
    got, real = function("attention.extend")(*arguments), sum(news)
    close(got[:real], extend_reference(*wide(arguments))[:real])
    assert got.isfinite().all()


@dtypes
@pytest.mark.parametrize("tokens", [1, 16, 50, 200])
@pytest.mark.parametrize("name", ["linear", "block_fp8_linear"])
def test_products_with_every_tactic_that_fits(dtype: torch.dtype, tokens: int, name: str) -> None:
    kernel = REGISTRY.get(f"gemm.{name}.triton")
    if not kernel.covers(torch.device("cuda"), dtype):
        pytest.skip("torch computes products in float32")
    x, weight, scales, _, out_size = workloads(SHAPES["qwen3-8b"], dtype).block_fp8_linear(tokens, 4096, 6144)
    full = dequantise(weight, scales)
    if name == "linear":
        full = full.to(dtype)
    arguments = (x, full, None) if name == "linear" else (x, weight, scales, None, out_size)
    candidates = importlib.import_module(kernel.function.__module__).CANDIDATES
    for tactic in candidates:
        with override_tactic(kernel, tactic):
            try:
                got = kernel.function(*arguments)
            except OutOfResources:
                assert tactic is not candidates[0], "the default has to fit"
                continue
            close(got, x.double() @ full.double().T)


def test_captured_attention_follows_the_lengths_of_each_replay() -> None:
    make = workloads(SHAPES["qwen3-8b"], torch.bfloat16)
    decode, extend = make.decode(8, 500, spare=9), make.extend(256, 100)
    run = function("attention.decode"), function("attention.extend")
    for call, arguments in zip(run, (decode, extend), strict=True):
        call(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [call(*arguments) for call, arguments in zip(run, (decode, extend), strict=True)]
    for most in (500, 16, 77):
        decode[4].copy_(torch.randint(1, most + 1, (8,)))
        new = min(most, 256)
        extend[5][1], extend[4][0] = new, new + most % 100
        graph.replay()
        close(got[0], decode_reference(*wide(decode)))
        close(got[1][:new], extend_reference(*wide(extend))[:new])


@pytest.mark.parametrize("rows", [1, 7, 256])
def test_sampling_takes_what_the_reference_takes(rows: int) -> None:
    make = workloads(SHAPES["qwen3-8b"], torch.float32)
    logits, heat, top_k, top_p, min_p, seeds, positions = make.sample(rows, 1.0, 0, 1.0)
    kinds = torch.arange(rows, device="cuda") % 6
    heat[kinds == 0] = 0
    top_k[kinds == 2], top_k[kinds == 4] = 40, 1000
    top_p[kinds == 3], top_p[kinds == 4] = 0.9, 0.8
    min_p[kinds == 5] = 0.05
    arguments = logits, heat, top_k, top_p, min_p, seeds, positions
    same = function("sampling.sample")(*arguments) == REGISTRY.get("sampling.sample.reference").function(*arguments)
    # Sums of probabilities are rounded in another order: a token at the very edge may fall either way.
    assert same.double().mean() > 0.98
    assert same[kinds == 0].all()
