"""Sums that tell whether anything was written."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.runtime.loader.checksum import PIECE, checksums


def memory(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("place", [0, 7, 8, PIECE - 1, PIECE, PIECE + 511])
def test_a_changed_byte_changes_the_sum_of_its_piece_alone(place: int) -> None:
    before = memory(PIECE + 512)
    after = before.clone()
    after[place] ^= 1
    old, new = checksums(before), checksums(after)
    assert [index for index in range(2) if old[index] != new[index]] == [place // PIECE]


def test_the_same_words_in_another_order_have_another_sum() -> None:
    words = torch.arange(64)
    assert checksums(words.view(torch.uint8)) != checksums(words.flip(0).contiguous().view(torch.uint8))
    assert checksums(words.view(torch.uint8)) == checksums(words.clone().view(torch.uint8))


def test_an_interchange_of_rows_has_another_sum() -> None:
    matrix = torch.randn(16, 16, generator=torch.Generator().manual_seed(2))
    assert checksums(matrix.view(-1).view(torch.uint8)) != checksums(matrix.t().contiguous().view(-1).view(torch.uint8))


def test_sums_are_those_of_arithmetic_modulo_two_to_the_64() -> None:
    words = memory(512).view(torch.int64).tolist()
    factors = [(index * 0x9E3779B97F4A7C15) | 1 for index in range(64)]
    total = sum(word * factor for word, factor in zip(words, factors, strict=True)) % 2**64
    (found,) = checksums(memory(512))
    assert found % 2**64 == total
