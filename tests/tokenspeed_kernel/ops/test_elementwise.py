"""Norm, rope, activation, embedding, linear and the KV write against their definitions in float64."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenspeed_kernel.ops.activation import silu_and_mul
from tokenspeed_kernel.ops.embedding import embedding
from tokenspeed_kernel.ops.gemm import linear
from tokenspeed_kernel.ops.kvcache import write_kv
from tokenspeed_kernel.ops.norm import add_rms_norm, rms_norm
from tokenspeed_kernel.ops.rope import apply_rope

SIZES = st.integers(1, 9)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
few = settings(max_examples=25, deadline=None)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(got: Tensor, want: Tensor) -> None:
    rough = 1e-5 if got.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), want, rtol=rough, atol=rough)


@few
@given(tokens=SIZES, size=SIZES, dtype=DTYPES, seed=st.integers(0, 99))
def test_rms_norm_with_and_without_residual(tokens: int, size: int, dtype: torch.dtype, seed: int) -> None:
    x, residual, weight = (
        random(seed + i, *shape, dtype=dtype) for i, shape in enumerate([(tokens, size), (tokens, size), (size,)])
    )

    def definition(value: Tensor) -> Tensor:
        return weight.double() * value / (value.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    near(got, definition(x.double()))
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    near(out, definition(total.double()))


@few
@given(tokens=SIZES, heads=SIZES, kv_heads=SIZES, half=SIZES, seed=st.integers(0, 99))
def test_rope_turns_each_pair_by_its_angle(tokens: int, heads: int, kv_heads: int, half: int, seed: int) -> None:
    qkv = random(seed, tokens, heads + kv_heads, 2 * half)
    query, key = qkv.split((heads, kv_heads), dim=1)
    angles = random(seed + 1, 20, half).double()
    positions = torch.randint(0, 20, (tokens,))
    turned = apply_rope(positions, query, key, torch.cat((angles.cos(), angles.sin()), -1).float())
    turn = torch.polar(torch.ones_like(angles), angles)[positions].unsqueeze(1)
    for got, x in zip(turned, (query, key), strict=True):
        want = torch.complex(*x.double().chunk(2, -1)) * turn
        near(got, torch.cat((want.real, want.imag), -1))


@few
@given(tokens=SIZES, size=SIZES, dtype=DTYPES, seed=st.integers(0, 99))
def test_silu_and_mul(tokens: int, size: int, dtype: torch.dtype, seed: int) -> None:
    x = random(seed, tokens, 2 * size, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    near(silu_and_mul(x), gate / (1 + (-gate).exp()) * up)


@few
@given(rows=SIZES, size=SIZES, first=st.integers(0, 20), seed=st.integers(0, 99))
def test_embedding_gives_zeros_for_ids_of_other_ranks(rows: int, size: int, first: int, seed: int) -> None:
    table = random(seed, rows, size)
    ids = torch.arange(0, 30)
    got = embedding(ids, table, first)
    for token_id in ids.tolist():
        held = first <= token_id < first + rows
        assert torch.equal(got[token_id], table[token_id - first] if held else torch.zeros(size))


@few
@given(tokens=SIZES, size=SIZES, outputs=SIZES, bias=st.booleans(), seed=st.integers(0, 99))
def test_linear(tokens: int, size: int, outputs: int, bias: bool, seed: int) -> None:
    x, weight, b = random(seed, tokens, size), random(seed + 1, outputs, size), random(seed + 2, outputs)
    want = x.double() @ weight.double().T + (b.double() if bias else 0)
    near(linear(x, weight, b if bias else None), want)


@few
@given(tokens=SIZES, heads=SIZES, size=SIZES, block_size=SIZES, seed=st.integers(0, 99))
def test_write_kv_writes_these_slots_and_no_others(
    tokens: int, heads: int, size: int, block_size: int, seed: int
) -> None:
    kv = random(seed, tokens, 3 * heads, size)
    key, value = kv[:, :heads], kv[:, 2 * heads :]
    pools = [random(seed + 1, 12, block_size, heads, size), random(seed + 2, 12, block_size, heads, size)]
    slots = torch.randperm(12 * block_size)[:tokens]
    want = [pool.clone() for pool in pools]
    for token, slot in enumerate(slots.tolist()):
        want[0][slot // block_size, slot % block_size] = key[token]
        want[1][slot // block_size, slot % block_size] = value[token]
    write_kv(key, value, *pools, slots)
    assert torch.equal(pools[0], want[0])
    assert torch.equal(pools[1], want[1])
