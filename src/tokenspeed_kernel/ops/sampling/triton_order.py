"""The k-th highest of many numbers in Triton, without a sort."""

from __future__ import annotations

from tokenspeed_kernel.triton_language import tl, triton


@triton.jit
def kth_highest(value, inside, k):
    """The k-th highest of the values inside, by halving the range of their bits."""
    order = tl.where(inside, _ordered_bits(value), 0)
    found = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        trial = found | bit
        bit = bit >> 1
        reached = tl.sum((inside & (order >= trial)).to(tl.int32), axis=0)
        found = tl.where(reached >= k, trial, found)
    return _value_of(found)


@triton.jit
def kth_highest_of_row(source, vocab_size, k, BLOCK: tl.constexpr):
    """The k-th highest logit of a row, likewise."""
    found = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        trial = found | bit
        bit = bit >> 1
        counts = tl.zeros([BLOCK], tl.int32)
        for first in range(0, vocab_size, BLOCK):
            number = first + tl.arange(0, BLOCK)
            logit = tl.load(source + number, mask=number < vocab_size, other=-float("inf"))
            counts += ((number < vocab_size) & (_ordered_bits(logit) >= trial)).to(tl.int32)
        found = tl.where(tl.sum(counts, axis=0) >= k, trial, found)
    return _value_of(found)


@triton.jit
def _ordered_bits(value):
    """Unsigned numbers in the order of the floats."""
    bits = value.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >= 0x80000000, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def _value_of(order):
    bits = tl.where(order >= 0x80000000, order ^ 0x80000000, order ^ 0xFFFFFFFF)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)
