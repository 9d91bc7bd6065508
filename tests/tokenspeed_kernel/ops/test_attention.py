"""Paged attention against a loop over tokens and heads in float64."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.tokenspeed_kernel.ops.solutions import DEVICE, each, few, solutions
from tokenspeed_kernel.ops.attention import decode_attention, extend_attention, reference, trimmed
from tokenspeed_kernel.ops.attention.backends import ordered, ordered_shape
from tokenspeed_kernel.registry import Kernel
from tokenspeed_kernel.triton_language import INTERPRETED


@dataclass
class Case:
    """Sequences of `lengths` (cached, new), their KV scattered over a pool that is NaN elsewhere."""

    lengths: list[tuple[int, int]]
    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    seed: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        totals = [cached + new for cached, new in self.lengths]
        widths = [-(-total // self.block_size) for total in totals]
        blocks = (torch.randperm(sum(widths), generator=generator) + 1).tolist()
        shape = (sum(widths) + 1, self.block_size, self.kv_heads, self.head_dim)
        self.pools = [torch.full(shape, math.nan, dtype=self.dtype) for _ in range(2)]
        for pool in self.pools:
            pool[0] = 0
        self.tables = torch.zeros(len(totals), max(widths) + 1, dtype=torch.int32)
        self.kv: list[tuple[Tensor, Tensor]] = []
        for row, (total, width) in enumerate(zip(totals, widths, strict=True)):
            mine = [blocks.pop() for _ in range(width)]
            self.tables[row, :width] = torch.tensor(mine, dtype=torch.int32)
            keys, values = (
                torch.randn(total, self.kv_heads, self.head_dim, generator=generator).to(self.dtype) for _ in "kv"
            )
            self.kv.append((keys, values))
            for pool, data in zip(self.pools, (keys, values), strict=True):
                for position in range(total):
                    pool[mine[position // self.block_size], position % self.block_size] = data[position]
        tokens = sum(new for _, new in self.lengths)
        self.query = torch.randn(tokens, self.kv_heads * self.group, self.head_dim, generator=generator)
        self.query = self.query.to(self.dtype)
        self.seq_lens = torch.tensor(totals, dtype=torch.int32)
        self.query_start = torch.tensor([0, *(new for _, new in self.lengths)]).cumsum(0).to(torch.int32)
        self.scale = self.head_dim**-0.5
        self.pools = [pool.to(DEVICE) for pool in self.pools]
        self.kv = [(keys.to(DEVICE), values.to(DEVICE)) for keys, values in self.kv]
        self.query, self.tables, self.seq_lens, self.query_start = (
            tensor.to(DEVICE) for tensor in (self.query, self.tables, self.seq_lens, self.query_start)
        )

    def expected(self) -> Tensor:
        rows = []
        for (cached, new), (keys, values) in zip(self.lengths, self.kv, strict=True):
            for position in range(cached, cached + new):
                token = self.query[len(rows)].double()
                k, v = (x[: position + 1].double().repeat_interleave(self.group, 1) for x in (keys, values))
                weights = (torch.einsum("hd,shd->hs", token, k) * self.scale).softmax(-1)
                rows.append(torch.einsum("hs,shd->hd", weights, v))
        return torch.stack(rows)

    def decode(self, kernel: Kernel) -> Tensor:
        return decode_attention(self.query, *self.pools, self.tables, self.seq_lens, self.scale, kernel=kernel)

    def extend(self, kernel: Kernel, **changes: Tensor) -> Tensor:
        start = changes.get("query_start", self.query_start)
        return extend_attention(
            changes.get("query", self.query),
            *self.pools,
            changes.get("tables", self.tables),
            changes.get("seq_lens", self.seq_lens),
            start,
            max(1, int(start.diff().max())),
            self.scale,
            kernel=kernel,
        )


def cases(new: st.SearchStrategy[int], dtype: torch.dtype = torch.float32) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        lengths=st.lists(st.tuples(st.integers(0, 40), new), min_size=1, max_size=6),
        kv_heads=st.integers(1, 3),
        group=st.integers(1, 4),
        head_dim=st.sampled_from([1, 4, 10, 16, 130]),
        block_size=st.sampled_from([1, 3, 4, 16]),
        seed=st.integers(0, 999),
        dtype=st.just(dtype),
    )


def use_tactic(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, **changes: int) -> None:
    """Change the default tactic of a Triton solution; others have none."""
    module = sys.modules[kernel.function.__module__]
    if hasattr(module, "CANDIDATES"):
        monkeypatch.setattr(module, "CANDIDATES", ({**module.CANDIDATES[0], **changes},))


def close(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@each("attention", "decode")
@few(40)
@given(case=cases(st.just(1)))
def test_decode(kernel: Kernel, case: Case) -> None:
    close(case.decode(kernel), case.expected())


@each("attention", "extend")
@few(40)
@given(case=cases(st.integers(1, 50)))
def test_extend_over_mixed_lengths(kernel: Kernel, case: Case) -> None:
    close(case.extend(kernel), case.expected())


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter computes products of bfloat16 wrongly")
@each("attention", "extend")
@few(40)
@given(case=cases(st.integers(1, 20), torch.bfloat16))
def test_extend_in_bfloat16(kernel: Kernel, case: Case) -> None:
    got = case.extend(kernel)
    assert got.dtype == torch.bfloat16
    close(got, case.expected(), 3e-2)


@each("attention", "extend")
def test_decode_and_extend_agree_on_rows_of_one_token(kernel: Kernel) -> None:
    case = Case([(5, 1), (0, 1), (33, 1)], 2, 3, 8, 4, seed=1)
    torch.testing.assert_close(case.extend(kernel), case.decode(solutions("attention", "decode")[0]))


@each("attention", "extend")
def test_work_in_parts_gives_the_same(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(3, 30), (20, 1), (0, 9)], 2, 2, 8, 4, seed=2)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 3000)
    monkeypatch.setattr(trimmed, "TILE_ROWS", 7)
    use_tactic(kernel, monkeypatch, block_kv=16, rows=16)
    close(case.extend(kernel), case.expected())


@each("attention", "decode")
@pytest.mark.parametrize("programs", [1, 8, 1000])
def test_decode_in_parts_gives_the_same(kernel: Kernel, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(99, 1), (0, 1), (33, 1), (15, 1), (16, 1)], 2, 3, 8, 4, seed=6)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 3000)
    use_tactic(kernel, monkeypatch, block_kv=16, programs=programs)
    close(case.decode(kernel), case.expected())


@each("attention", "extend")
def test_a_cache_whose_memory_has_another_order_gives_the_same(kernel: Kernel) -> None:
    """Backends may keep the tokens of a head together; every kernel sees the same four dimensions."""
    case = Case([(3, 30), (20, 1), (0, 9)], 2, 2, 8, 4, seed=7)
    blocks, block_size, kv_heads, head_dim = case.pools[0].shape
    for index, pool in enumerate(case.pools):
        memory = pool.new_empty(ordered_shape((blocks, block_size, kv_heads, head_dim), "HND"))
        case.pools[index] = ordered(memory, "HND").copy_(pool)
        assert case.pools[index].stride(2) > case.pools[index].stride(1)
    close(case.extend(kernel), case.expected())


@each("attention", "extend")
def test_padding_tokens_and_rows_change_nothing_and_are_finite(kernel: Kernel) -> None:
    case = Case([(3, 30), (20, 1), (0, 9)], 2, 2, 8, 4, seed=3)
    tokens = case.query.shape[0]
    got = case.extend(
        kernel,
        query=torch.cat((case.query, case.query.new_zeros(7, *case.query.shape[1:]))),
        tables=torch.cat((case.tables, case.tables.new_zeros(2, case.tables.shape[1]))),
        seq_lens=torch.cat((case.seq_lens, case.seq_lens.new_zeros(2))),
        query_start=torch.cat((case.query_start, case.query_start[-1:].expand(2))),
    )
    close(got[:tokens], case.expected())
    assert got.isfinite().all()


@each("attention", "extend")
def test_a_step_of_padding_only_is_finite(kernel: Kernel) -> None:
    case = Case([(3, 30), (20, 1)], 2, 2, 8, 4, seed=3)
    got = case.extend(
        kernel,
        tables=torch.zeros_like(case.tables),
        seq_lens=torch.zeros_like(case.seq_lens),
        query_start=torch.zeros_like(case.query_start),
    )
    assert got.shape == case.query.shape
    assert got.isfinite().all()


@each("attention", "decode")
def test_a_padding_row_of_decode_is_finite(kernel: Kernel) -> None:
    case = Case([(5, 1)], 2, 2, 8, 4, seed=4)
    got = decode_attention(
        case.query.repeat(2, 1, 1),
        *case.pools,
        torch.cat((case.tables, torch.zeros_like(case.tables))),
        torch.tensor([6, 0], dtype=torch.int32, device=DEVICE),
        case.scale,
        kernel=kernel,
    )
    assert got.isfinite().all()
    close(got[:1], case.expected())


def test_the_reference_computes_on_tensors_without_reading_them() -> None:
    """On meta, a read of a value raises, and what depends on one has no shape."""
    case = Case([(3, 30), (20, 1), (0, 9)], 2, 2, 8, 4, seed=5)
    query, keys, values, tables, seq_lens, start = (
        tensor.to("meta") for tensor in (case.query, *case.pools, case.tables, case.seq_lens, case.query_start)
    )
    assert reference.extend(query, keys, values, tables, seq_lens, start, 30, 1.0).shape == query.shape
    assert reference.decode(query[:3], keys, values, tables, seq_lens, 1.0).shape == query[:3].shape
