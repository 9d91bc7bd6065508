"""Norm, rope, activation, embedding and the KV write against their definitions in float64."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.tokenspeed_kernel.ops.solutions import DEVICE, DTYPES, each, few, near, random
from tokenspeed_kernel.ops.activation import silu_and_mul
from tokenspeed_kernel.ops.attention.backends import ordered
from tokenspeed_kernel.ops.embedding import embedding
from tokenspeed_kernel.ops.kvcache import write_kv
from tokenspeed_kernel.ops.norm import add_rms_norm, rms_norm
from tokenspeed_kernel.ops.rope import apply_rope, rope_and_write_kv
from tokenspeed_kernel.registry import Kernel

COUNTS = st.integers(0, 9)
HEADS = st.integers(1, 9)
SIZES = st.sampled_from([1, 2, 7, 9, 64, 129, 1100])
SEEDS = st.integers(0, 99)


def rms(value: Tensor, weight: Tensor) -> Tensor:
    return weight.double() * value / (value.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def turn(x: Tensor, positions: Tensor, angles: Tensor) -> Tensor:
    """The pairs of a head as complex numbers, turned."""
    factor = torch.polar(torch.ones_like(angles), angles)[positions].unsqueeze(1)
    turned = torch.complex(*x.double().chunk(2, -1)) * factor
    return torch.cat((turned.real, turned.imag), -1)


@each("norm", "rms_norm")
@few(25)
@given(tokens=COUNTS, heads=HEADS, size=SIZES, dtype=DTYPES, seed=SEEDS)
def test_rms_norm(kernel: Kernel, tokens: int, heads: int, size: int, dtype: torch.dtype, seed: int) -> None:
    weight, x = random(seed, size, dtype=dtype), random(seed + 1, tokens, 2 * heads, size, dtype=dtype)
    for value in (x[:, 0], x[:, :heads], x.flatten(1)[:, ::2][:, :size]):
        gain = weight[: value.shape[-1]]
        got = rms_norm(value, gain, 1e-5, kernel=kernel)
        assert got.dtype == dtype
        near(got, rms(value.double(), gain))


@each("norm", "add_rms_norm")
@few(25)
@given(tokens=COUNTS, size=SIZES, dtype=DTYPES, seed=SEEDS)
def test_add_rms_norm_gives_the_norm_of_the_sum_and_the_sum(
    kernel: Kernel, tokens: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    weight, wide = random(seed, size, dtype=dtype), random(seed + 1, tokens, 2 * size, dtype=dtype)
    x, residual = wide[:, :size], random(seed + 2, tokens, size, dtype=dtype)
    out, total = add_rms_norm(x, residual, weight, 1e-5, kernel=kernel)
    assert torch.equal(total, x + residual)
    near(out, rms(total.double(), weight))


@each("rope", "apply_rope")
@few(25)
@given(tokens=COUNTS, heads=HEADS, kv_heads=HEADS, half=HEADS, seed=SEEDS)
def test_rope_turns_each_pair_by_its_angle(
    kernel: Kernel, tokens: int, heads: int, kv_heads: int, half: int, seed: int
) -> None:
    query, key = random(seed, tokens, heads + kv_heads, 2 * half).split((heads, kv_heads), dim=1)
    angles = random(seed + 1, 20, half).double()
    positions = torch.randint(0, 20, (tokens,), device=DEVICE)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).float()
    for got, x in zip(apply_rope(positions, query, key, cos_sin, kernel=kernel), (query, key), strict=True):
        near(got, turn(x, positions, angles))


@each("rope", "rope_and_write_kv")
@few(25)
@given(
    tokens=COUNTS,
    heads=HEADS,
    kv_heads=HEADS,
    half=st.sampled_from([1, 3, 8, 64]),
    block_size=HEADS,
    normalise=st.booleans(),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_rope_and_write_kv(
    kernel: Kernel,
    tokens: int,
    heads: int,
    kv_heads: int,
    half: int,
    block_size: int,
    normalise: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    qkv = random(seed, tokens, heads + 2 * kv_heads, 2 * half, dtype=dtype)
    query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
    angles = random(seed + 1, 20, half).double()
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).float()
    positions = torch.randint(0, 20, (tokens,), device=DEVICE)
    pools = [random(seed + i, 12, block_size, kv_heads, 2 * half, dtype=dtype) for i in (2, 3)]
    slots = torch.randperm(12 * block_size)[:tokens].to(DEVICE)
    weights = [random(seed + i, 2 * half, dtype=dtype) for i in ((4, 5) if normalise else ())]
    want_query, want_key = query.double(), key.double()
    if normalise:
        want_query, want_key = rms(want_query, weights[0]), rms(want_key, weights[1])
    before = [pool.clone() for pool in pools]
    got = rope_and_write_kv(positions, query, key, value, cos_sin, *pools, slots, *weights, eps=1e-5, kernel=kernel)
    near(got, turn(want_query, positions, angles))
    keys, values = (pool.flatten(0, 1) for pool in pools)
    near(keys[slots], turn(want_key, positions, angles))
    assert torch.equal(values[slots], value)
    others = torch.ones(12 * block_size, dtype=torch.bool, device=DEVICE).index_fill(0, slots, False)
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool.flatten(0, 1)[others], old.flatten(0, 1)[others])


@each("activation", "silu_and_mul")
@few(25)
@given(tokens=COUNTS, size=SIZES, dtype=DTYPES, seed=SEEDS)
def test_silu_and_mul(kernel: Kernel, tokens: int, size: int, dtype: torch.dtype, seed: int) -> None:
    x = random(seed, tokens, 3 * size, dtype=dtype)[:, : 2 * size]
    gate, up = x.double().chunk(2, -1)
    near(silu_and_mul(x, kernel=kernel), gate / (1 + (-gate).exp()) * up)


@each("embedding", "embedding")
@few(25)
@given(rows=HEADS, size=SIZES, first=st.integers(0, 20), dtype=DTYPES, seed=SEEDS)
def test_embedding_gives_zeros_for_ids_of_other_ranks(
    kernel: Kernel, rows: int, size: int, first: int, dtype: torch.dtype, seed: int
) -> None:
    table = random(seed, rows, size, dtype=dtype)
    for ids in (torch.arange(0, 30, device=DEVICE), torch.arange(0, 30, device=DEVICE)[::3]):
        got = embedding(ids, table, first, kernel=kernel)
        for row, token_id in zip(got, ids.tolist(), strict=True):
            held = first <= token_id < first + rows
            assert torch.equal(row, table[token_id - first] if held else torch.zeros_like(row))


@each("kvcache", "write_kv")
@few(25)
@given(tokens=COUNTS, heads=HEADS, size=st.sampled_from([1, 5, 64]), block_size=HEADS, seed=SEEDS)
def test_write_kv_writes_these_slots_and_no_others(
    kernel: Kernel, tokens: int, heads: int, size: int, block_size: int, seed: int
) -> None:
    kv = random(seed, tokens, 3 * heads, size)
    key, value = kv[:, :heads], kv[:, 2 * heads :]
    pools = [random(seed + 1, 12, block_size, heads, size), random(seed + 2, 12, block_size, heads, size)]
    slots = torch.randperm(12 * block_size)[:tokens]
    want = [pool.clone() for pool in pools]
    for token, slot in enumerate(slots.tolist()):
        want[0][slot // block_size, slot % block_size] = key[token]
        want[1][slot // block_size, slot % block_size] = value[token]
    # The same in memory of another order, which some backends of attention want.
    others = [ordered(pool.transpose(1, 2).contiguous(), "HND") for pool in pools]
    for target in (pools, others):
        write_kv(key, value, *target, slots.to(DEVICE), kernel=kernel)
        assert torch.equal(target[0], want[0])
        assert torch.equal(target[1], want[1])
