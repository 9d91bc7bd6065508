"""Time of every kernel of a decode step, beside the time that its bytes or operations take at least.

    python benchmarks/kernels.py [--op attention.decode] [--batch 1 16 64 256] [--context 1000] [--json FILE]

Sizes are those of Qwen3-8B in bfloat16. A kernel is captured many times in one graph, over inputs that together
exceed the L2 cache, and the graph is replayed: launch gaps are those of a captured step. Floors are measured on
the same GPU: bytes over the bandwidth of a large copy, operations over the rate of a large product.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tokenspeed_kernel.ops  # noqa: F401
from tokenspeed_kernel.registry import REGISTRY, Kernel
from tokenspeed_kernel.tactics import TACTICS
from tokenspeed_kernel.workloads import ModelShape, Workloads

SHAPE = ModelShape(4096, 32, 8, 128, 12288, 151936, 16)
"""Qwen3-8B."""
SIZE = 2
"""Bytes of a number."""
SPARE_BLOCKS = 256
"""Blocks by which the tables of a captured step are wider than its sequences."""
L2_BYTES = 120 << 20
"""Inputs of one graph together have at least so many bytes."""
MOST_COPIES = 48
LARGEST_REFERENCE = 2 << 30
"""Bytes of work from which on the reference of attention, which gathers all of it, is left out."""


@dataclass(frozen=True)
class Work:
    """One call of an operation: its inputs, and the least bytes and operations that it takes."""

    op: str
    label: str
    make: Callable[[], tuple[Any, ...]]
    num_bytes: float
    flops: float = 0.0


@dataclass
class Result:
    """Microseconds of one call, and its ratio to the floor."""

    op: str
    label: str
    solution: str
    us: float
    gbytes_s: float
    tflops: float
    ratio: float


def step_works(make: Workloads, batch: int, context: int) -> Iterator[Work]:
    """The kernels of a decode step of `batch` sequences."""
    label, row = f"batch {batch}", batch * SHAPE.hidden_size * SIZE
    heads = (SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.head_dim
    middle = SHAPE.intermediate_size
    yield Work("norm.add_rms_norm", label, partial(make.add_rms_norm, batch), 4 * row)
    rope_bytes = batch * (2 * heads * SIZE + 4 * SHAPE.head_dim)
    yield Work("rope.rope_and_write_kv", label, partial(make.rope_and_write_kv, batch, True), rope_bytes)
    yield Work("activation.silu_and_mul", label, partial(make.silu_and_mul, batch), 3 * batch * middle * SIZE)
    kv = 2 * batch * context * SHAPE.kv_heads * SHAPE.head_dim * SIZE
    decode = partial(make.decode, batch, context, SPARE_BLOCKS)
    yield Work("attention.decode", f"{label} context {context}", decode, kv + 2 * row)
    for name, ins, outs in (
        ("qkv", SHAPE.hidden_size, heads),
        ("o", SHAPE.heads * SHAPE.head_dim, SHAPE.hidden_size),
        ("gate_up", SHAPE.hidden_size, 2 * middle),
        ("down", middle, SHAPE.hidden_size),
        ("lm_head", SHAPE.hidden_size, SHAPE.vocab_size),
    ):
        moved = (outs * ins + batch * (ins + outs)) * SIZE
        linear = partial(make.linear, batch, ins, outs)
        yield Work("gemm.linear", f"{label} {name}", linear, moved, 2.0 * batch * outs * ins)
        if name == "gate_up":
            fp8 = partial(make.block_fp8_linear, batch, ins, outs)
            moved = outs * ins + batch * (ins + outs) * SIZE
            yield Work("gemm.block_fp8_linear", f"{label} {name}", fp8, moved, 2.0 * batch * outs * ins)
    for name, heat, top_k, top_p in (
        ("greedy", 0.0, 0, 1.0),
        ("temperature", 1.0, 0, 1.0),
        ("top-p", 1.0, 0, 0.9),
        ("top-k 20 top-p", 0.6, 20, 0.95),
    ):
        sample = partial(make.sample, batch, heat, top_k, top_p)
        yield Work("sampling.sample", f"{label} {name}", sample, batch * SHAPE.vocab_size * 4)


def prefill_works(make: Workloads) -> Iterator[Work]:
    """Attention of one prompt."""
    for tokens, cached in ((1024, 0), (2048, 0), (8192, 0), (512, 8192)):
        pairs = tokens * (cached + (tokens + 1) / 2)
        moved = 4 * (tokens * SHAPE.heads + (tokens + cached) * SHAPE.kv_heads) * SHAPE.head_dim
        flops = 4 * pairs * SHAPE.heads * SHAPE.head_dim
        extend = partial(make.extend, tokens, cached, SPARE_BLOCKS)
        yield Work("attention.extend", f"{tokens} after {cached}", extend, moved, flops)


def measure(function: Callable[..., Any], make: Callable[[], tuple[Any, ...]], num_bytes: float) -> float:
    """Median microseconds of one call."""
    copies = int(min(MOST_COPIES, max(4, L2_BYTES // max(num_bytes, 1))))
    inputs = [make() for _ in range(copies)]
    for arguments in inputs[:2]:
        function(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arguments in inputs:
            function(*arguments)
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / copies)
    return statistics.median(times)


def bandwidth() -> float:
    """Bytes a second of a large copy, read and written ones together."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    # Not `copy_`: a graph makes that a copy of the driver's, which reaches two thirds of what kernels do.
    write = partial(torch.neg, out=target)
    return 8 * source.numel() / (measure(write, lambda: (source,), 4 * source.numel()) * 1e-6)


def matmul_rate(make: Workloads) -> float:
    """Operations a second of a large product."""
    size = 8192
    a, b = make.random(size, size), make.random(size, size)
    return 2 * size**3 / (measure(torch.mm, lambda: (a, b), size * size * 4) * 1e-6)


def runs_here(kernel: Kernel, work: Work) -> bool:
    """Whether a solution is timed."""
    if kernel.family == "attention" and kernel.solution == "reference" and work.num_bytes > LARGEST_REFERENCE:
        return False
    dtype = torch.float32 if kernel.family == "sampling" else torch.bfloat16
    return kernel.covers(torch.device("cuda"), dtype)


def run(work: Work, bytes_s: float, flops_s: float, tune: bool) -> Iterator[Result]:
    """Time every solution that runs on a GPU."""
    for kernel in REGISTRY.kernels(*work.op.split(".")):
        if not runs_here(kernel, work):
            continue
        if tune:
            with TACTICS.window():
                kernel.function(*work.make())
        us = measure(kernel.function, work.make, work.num_bytes)
        floor = max(work.num_bytes / bytes_s, work.flops / flops_s) * 1e6
        rates = work.num_bytes / us / 1e3, work.flops / us / 1e6
        yield Result(work.op, work.label, kernel.solution, us, *rates, us / floor)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the kernels of a step of Qwen3-8B.")
    parser.add_argument("--op", nargs="*", default=[], help="operations to time (default: all)")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--tune", action="store_true", help="find the best tactics first, and print them")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    make = Workloads(SHAPE, torch.device("cuda"), torch.bfloat16)
    bytes_s, flops_s = bandwidth(), matmul_rate(make)
    print(f"{torch.cuda.get_device_name()}: copy {bytes_s / 1e12:.2f} TB/s, product {flops_s / 1e12:.0f} TFLOP/s")
    print(f"{'operation':<24} {'size':<28} {'solution':<10} {'us':>9} {'GB/s':>7} {'TFLOP/s':>8} {'x floor':>8}")
    results = []
    steps = (work for batch in options.batch for work in step_works(make, batch, options.context))
    for work in (*steps, *prefill_works(make)):
        if options.op and work.op not in options.op:
            continue
        for result in run(work, bytes_s, flops_s, options.tune):
            results.append(result)
            print(
                f"{result.op:<24} {result.label:<28} {result.solution:<10} {result.us:>9.1f} "
                f"{result.gbytes_s:>7.0f} {result.tflops:>8.1f} {result.ratio:>8.2f}",
                flush=True,
            )
        torch.cuda.empty_cache()
    for key, tuned in TACTICS.found.items():
        print(f"{key:<60} {tuned.us:>9.1f} us  {dict(tuned.tactic)}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
