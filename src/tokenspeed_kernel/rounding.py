"""Integers rounded up, for grids and blocks. Triton's functions of these names cost the host ten times as much."""

from __future__ import annotations


def cdiv(number: int, divisor: int) -> int:
    """`number / divisor`, rounded up; both are positive, or `number` is 0."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is at least `number`; 1 for numbers below 1."""
    return 1 << max(number - 1, 0).bit_length()
