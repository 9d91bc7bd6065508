"""One call of every solution that Triton compiles, with the sizes of real models, which decide the specialisations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import tokenspeed_kernel.ops  # noqa: F401
from tests.tokenspeed_kernel.ops.solutions import own_product
from tokenspeed_kernel.ops.gemm.block_fp8 import DTYPE, process
from tokenspeed_kernel.registry import REGISTRY

COMPILED = ("gluon", "triton")
"""Solutions that Triton compiles."""
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, BLOCK_SIZE, BLOCKS = 4096, 32, 8, 128, 1024, 16, 12


def launch_all(device: torch.device, dtype: torch.dtype, wanted: Callable[[str], bool]) -> None:
    """Call each solution; its results are not looked at."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def index(*values: int, kind: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    def call(name: str, *arguments: object) -> None:
        for kernel in REGISTRY.kernels(*name.split(".")):
            if kernel.solution in COMPILED and wanted(kernel.name):
                kernel.function(*arguments)

    tokens = 4
    x = random(tokens, HIDDEN)
    call("norm.rms_norm", x, random(HIDDEN), 1e-6)
    call("norm.add_rms_norm", x, x, random(HIDDEN), 1e-6)
    call("activation.silu_and_mul", random(tokens, 2 * MLP))
    call("embedding.embedding", index(1, 2, 3), random(10, HIDDEN), 0)
    if dtype != torch.float32:
        with own_product(REGISTRY.get("gemm.linear.triton")):
            call("gemm.linear", x, random(MLP, HIDDEN), None)
            call("gemm.linear", random(40, 1000), random(MLP, 1000), random(MLP))
    weight, scales = process(random(MLP, HIDDEN).to(DTYPE), torch.ones(MLP // 128, HIDDEN // 128, device=device))
    for rows in (1, 200):
        call("gemm.block_fp8_linear", random(rows, HIDDEN), weight, scales, None, MLP)
    for head_dim, group in ((HEAD_DIM, HEADS // KV_HEADS), (64, 3)):
        heads = KV_HEADS * group
        query, key, value = random(tokens, heads + 2 * KV_HEADS, head_dim).split((heads, KV_HEADS, KV_HEADS), 1)
        pools = random(BLOCKS, BLOCK_SIZE, KV_HEADS, head_dim), random(BLOCKS, BLOCK_SIZE, KV_HEADS, head_dim)
        slots, positions = torch.arange(tokens, device=device), torch.arange(tokens, device=device)
        cos_sin = torch.randn(64, head_dim, device=device)
        call("rope.apply_rope", positions, query, key, cos_sin)
        call("kvcache.write_kv", key, value, *pools, slots)
        norms = random(head_dim), random(head_dim), 1e-6
        for weights in (norms, (None, None, 0.0)):
            call("rope.rope_and_write_kv", positions, query, key, value, cos_sin, *pools, slots, *weights)
        tables = torch.zeros(tokens, BLOCKS, dtype=torch.int32, device=device)
        lengths = torch.full((tokens,), 40, dtype=torch.int32, device=device)
        call("attention.decode", query, *pools, tables, lengths, 0.1)
        many = random(200, heads, head_dim)
        few = tables[:1].expand(200, -1), lengths[:1].expand(200)
        call("attention.decode", many, *pools, *few, 0.1)
        starts = index(0, 1, 2, 3, 4, kind=torch.int32)
        call("attention.extend", query, *pools, tables, lengths, starts, 1, 0.1)
        call("attention.extend", many, *pools, tables[:1], lengths[:1], index(0, 200, kind=torch.int32), 200, 0.1)
    # Wide heads of wide numbers fill the shared memory.
    query = torch.randn(tokens, 2, 256, device=device)
    pools = torch.randn(2, BLOCKS, BLOCK_SIZE, 1, 256, device=device).unbind()
    call("attention.decode", query, *pools, tables, lengths, 0.1)
    call("attention.extend", query, *pools, tables, lengths, starts, 1, 0.1)
    rows = 2
    floats = torch.ones(rows, device=device)
    counts = torch.ones(rows, dtype=torch.int64, device=device)
    logits = torch.randn(rows, 151936, device=device)
    call("sampling.sample", logits, floats, counts, floats, floats, counts, counts)
