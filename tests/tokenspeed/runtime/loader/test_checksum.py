"""Sums that tell whether anything was written."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.runtime.loader.checksum import PIECE, checksums


def memory(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("place", [0, 7, 8, PIECE - 1, PIECE, PIECE + 511])
def test_a_changed_byte_changes_the_sum(place: int) -> None:
    before = memory(PIECE + 512)
    after = before.clone()
    after[place] ^= 1
    assert checksums([before, before]) == checksums([before.clone()]) * 2
    assert checksums([before]) != checksums([after])


def test_each_span_has_its_own_sum() -> None:
    whole = memory(64)
    assert checksums([whole[:32], whole[32:]]) == [*checksums([whole[:32]]), *checksums([whole[32:]])]
    assert checksums([]) == []


def test_the_same_words_in_another_order_have_another_sum() -> None:
    words = torch.arange(2 * PIECE // 8)
    pieces = words.view(2, -1).flip(0).reshape(-1)
    matrix = words.view(512, -1).t().reshape(-1)
    sums = checksums([order.contiguous().view(torch.uint8) for order in (words, words.flip(0), pieces, matrix)])
    assert len(set(sums)) == 4


def test_sums_are_those_of_arithmetic_modulo_two_to_the_64() -> None:
    words = memory(512).view(torch.int64).tolist()
    factors = [(index * 0x9E3779B97F4A7C15) | 1 for index in range(64)]
    total = sum(word * factor for word, factor in zip(words, factors, strict=True)) % 2**64
    (found,) = checksums([memory(512)])
    assert found % 2**64 == total
