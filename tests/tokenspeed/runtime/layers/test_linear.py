from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenspeed.errors import ConfigError
from tokenspeed.runtime.layers.base import Layer, divide
from tokenspeed.runtime.layers.embedding import VocabParallelEmbedding
from tokenspeed.runtime.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear

CPU = torch.device("cpu")
few = settings(max_examples=30, deadline=None)


def ranks(size: int) -> list[Any]:
    """Groups whose collectives leave this rank's part as it is."""
    return [
        SimpleNamespace(rank=rank, size=size, all_reduce=lambda t: t, all_gather_last=lambda t: t)
        for rank in range(size)
    ]


def fill(layer: Any, whole: dict[str, Tensor]) -> Any:
    """The layer with its part of `whole`, which maps "source.parameter" to checkpoint tensors."""
    assert isinstance(layer, Layer)
    layer.to_empty(device=CPU)
    for slot in layer.slots():
        tensor = whole[f"{slot.source}.{slot.parameter}"]
        assert tuple(tensor.shape) == slot.shape
        layer.load(slot, tensor)
    layer.plan(CPU, torch.float32)
    return layer


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@few
@given(
    size=st.sampled_from([1, 2, 3]),
    parts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    bias=st.booleans(),
)
def test_merged_columns(size: int, parts: list[int], bias: bool) -> None:
    sizes = [part * size for part in parts]
    names = [f"part{i}" for i in range(len(sizes))]
    whole = {f"{n}.weight": drawn(s, 5) for n, s in zip(names, sizes, strict=True)}
    whole |= {f"{n}.bias": drawn(s) for n, s in zip(names, sizes, strict=True)}
    x = drawn(4, 5)
    results = []
    for group in ranks(size):
        layer = fill(ColumnParallelLinear(5, sizes, bias, group, names), whole)
        results.append(layer(x).split([s // size for s in sizes], dim=-1))
    for i, name in enumerate(names):
        want = x @ whole[f"{name}.weight"].T + (whole[f"{name}.bias"] if bias else 0)
        torch.testing.assert_close(torch.cat([result[i] for result in results], -1), want)


@few
@given(size=st.sampled_from([1, 2, 3]), bias=st.booleans())
def test_partial_rows_add_up_and_the_bias_counts_once(size: int, bias: bool) -> None:
    whole = {".weight": drawn(4, 6), ".bias": drawn(4)}
    x = drawn(3, 6)
    parts = x.chunk(size, dim=-1)
    layers = [fill(RowParallelLinear(6, 4, bias, group), whole) for group in ranks(size)]
    got = sum(layer(part) for layer, part in zip(layers, parts, strict=True))
    torch.testing.assert_close(got, x @ whole[".weight"].T + (whole[".bias"] if bias else 0))


@few
@given(
    heads_size=st.sampled_from([(4, 4, 2), (4, 2, 1), (4, 2, 2), (4, 2, 4), (8, 2, 8), (6, 1, 3), (6, 3, 3)]),
    bias=st.booleans(),
)
def test_every_query_head_is_with_its_kv_head(heads_size: tuple[int, int, int], bias: bool) -> None:
    heads, kv_heads, size = heads_size
    names = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    whole = {f"{name}.weight": drawn(n * 2, 5) for name, n in names.items()}
    whole |= {f"{name}.bias": drawn(n * 2) for name, n in names.items()}
    x = drawn(3, 5)
    want = {
        name: (x @ whole[f"{name}.weight"].T + (whole[f"{name}.bias"] if bias else 0)).unflatten(-1, (-1, 2))
        for name in names
    }
    for group in ranks(size):
        query, key, value = fill(QKVParallelLinear(5, 2, heads, kv_heads, bias, group), whole)(x)
        local = heads // size
        assert query.shape == (3, local, 2)
        for i in range(local):
            head = group.rank * local + i
            torch.testing.assert_close(query[:, i], want["q_proj"][:, head])
            mine, its = i // (local // key.shape[1]), head // (heads // kv_heads)
            torch.testing.assert_close(key[:, mine], want["k_proj"][:, its])
            torch.testing.assert_close(value[:, mine], want["v_proj"][:, its])


@few
@given(vocab=st.integers(1, 9), size=st.integers(1, 4))
def test_the_vocabulary_is_spread_whatever_its_size(vocab: int, size: int) -> None:
    whole = {".weight": drawn(vocab, 3)}
    layers = [fill(VocabParallelEmbedding(vocab, 3, group), whole) for group in ranks(size)]
    for layer in layers:
        layer.weight.nan_to_num_(0.0)
    ids = torch.arange(vocab)
    assert torch.equal(sum(layer(ids) for layer in layers), whole[".weight"])
    x = drawn(2, 3)
    logits = torch.cat([layer.logits(x) for layer in layers], -1)[:, :vocab]
    torch.testing.assert_close(logits, x @ whole[".weight"].T)


def test_sizes_that_do_not_divide_are_refused_with_those_that_do() -> None:
    group = ranks(4)[0]
    with pytest.raises(ConfigError, match="size 4 does not divide 6 inputs of a linear layer; use one of 1, 2, 3, 6"):
        RowParallelLinear(6, 4, False, group)
    with pytest.raises(ConfigError, match="outputs of a linear layer"):
        ColumnParallelLinear(4, (8, 6), False, group)
    with pytest.raises(ConfigError, match="6 attention heads"):
        QKVParallelLinear(4, 2, 6, 2, False, group)
    with pytest.raises(ConfigError, match="3 KV heads"):
        QKVParallelLinear(4, 2, 12, 3, False, group)
    assert divide(12, 4, "heads") == 3
