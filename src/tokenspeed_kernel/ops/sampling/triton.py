"""Sampling in Triton without a sort.

What top-k, top-p and min-p leave is a head of the order by falling score. So the token with the most noisy score
is drawn first, and asked whether it is in that head; if not, neither is any token after it in the order, and the
draw is repeated among those before it. That ends with the very token that a filter before the draw would give,
mostly after one round: a token that is drawn is likely, and a likely token is in the head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.registry import register_kernel
from tokenspeed_kernel.triton_language import DEVICES, tl, triton

PRIORITY = 10
BLOCK = 2048
"""Tokens of one step of a loop."""
PROGRAMS = 264
"""Programs that fill a GPU in the first pass over the logits."""
MOST_PARTS = 64


@register_kernel("sampling", "sample", solution="triton", priority=PRIORITY, devices=DEVICES, dtypes=(torch.float32,))
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    parts = min(max(1, PROGRAMS // rows), MOST_PARTS, triton.cdiv(vocab_size, BLOCK))
    drawn = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    highest = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    draw_kernel[(rows, parts)](
        logits,
        temperature,
        seeds,
        positions,
        drawn,
        tokens,
        highest,
        logits.stride(0),
        vocab_size,
        PARTS=parts,
        BLOCK=BLOCK,
        num_warps=8,
    )
    accept_kernel[(rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        drawn,
        tokens,
        highest,
        out,
        logits.stride(0),
        vocab_size,
        PARTS=parts,
        BLOCK_PARTS=triton.next_power_of_2(parts),
        BLOCK=BLOCK,
        num_warps=8,
    )
    return out


@triton.jit
def draw_kernel(
    logits,
    temperature,
    seeds,
    positions,
    drawn,
    tokens,
    highest,
    logits_stride,
    vocab_size,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best token of one part of a row: under the noise, or by its logit where the row is greedy."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    heat = tl.load(temperature + row)
    key = _row_key(tl.load(seeds + row), tl.load(positions + row))
    share = tl.cdiv(tl.cdiv(vocab_size, PARTS), BLOCK) * BLOCK
    begin = part * share
    end = tl.minimum(begin + share, vocab_size)
    source = logits + row * logits_stride
    best, token, top = -float("inf"), begin, -float("inf")
    for first in range(begin, end, BLOCK):
        number = first + tl.arange(0, BLOCK)
        logit = tl.load(source + number, mask=number < end, other=-float("inf"))
        if heat > 0:
            score = _scaled(logit, heat)
            top = tl.maximum(top, tl.max(score, axis=0))
            score += _gumbel(key, number)
        else:
            score = logit
        most, where = tl.max(score, axis=0, return_indices=True)
        better = most > best
        token = tl.where(better, first + where, token)
        best = tl.where(better, most, best)
    tl.store(drawn + row * PARTS + part, best)
    tl.store(tokens + row * PARTS + part, token)
    tl.store(highest + row * PARTS + part, top)


@triton.jit
def accept_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    drawn,
    tokens,
    highest,
    out,
    logits_stride,
    vocab_size,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge the parts of a row, and draw again until the token is one that the filters leave."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_PARTS)
    inside = part < PARTS
    best = tl.load(drawn + row * PARTS + part, mask=inside, other=-float("inf"))
    _, where = tl.max(best, axis=0, return_indices=True)
    token = tl.load(tokens + row * PARTS + where)
    heat = tl.load(temperature + row)
    k, p, least_p = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    k = tl.where(k >= vocab_size, 0, k)
    if heat > 0 and (k > 0 or p < 1 or least_p > 0):
        source = logits + row * logits_stride
        key = _row_key(tl.load(seeds + row), tl.load(positions + row))
        top = tl.max(tl.load(highest + row * PARTS + part, mask=inside, other=-float("inf")), axis=0)
        least = tl.full([], -float("inf"), tl.float32)
        if least_p > 0:
            least = top + tl.log(least_p)
        mass = 0.0
        if p < 1:
            floor = tl.full([], -float("inf"), tl.float32)
            if k > 0:
                floor = _kth_score(source, vocab_size, heat, k, BLOCK)
            mass = p * _mass(source, vocab_size, heat, top, floor, BLOCK)
        accepted = heat <= 0
        while not accepted:
            score = _scaled(tl.load(source + token), heat)
            higher, before = _standing(source, vocab_size, heat, top, score, token, BLOCK)
            accepted = (k <= 0) | (higher < k)
            accepted = accepted & ((p >= 1) | (before < mass)) & (score >= least)
            # The first token of the order always stays; a NaN accepts nothing and must not loop for ever.
            accepted = accepted | (score >= top) & (before <= 0) | (score != score) | (top != top)
            if not accepted:
                again = _redraw(source, vocab_size, heat, key, score, token, BLOCK)
                accepted = again < 0
                token = tl.where(accepted, token, again)
    tl.store(out + row, token.to(tl.int64))


@triton.jit
def _scaled(logit, heat):
    # Rounded as torch divides: an approximate quotient would order tokens otherwise.
    return tl.math.div_rn(logit, heat)


@triton.jit
def _standing(source, vocab_size, heat, top, score, token, BLOCK: tl.constexpr):
    """How many tokens score higher than `token`, and the mass of those before it in the order."""
    higher = tl.zeros([BLOCK], tl.int32)
    before = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab_size, BLOCK):
        number = first + tl.arange(0, BLOCK)
        other = _scaled(tl.load(source + number, mask=number < vocab_size, other=-float("inf")), heat)
        higher += (other > score).to(tl.int32)
        earlier = (other > score) | ((other == score) & (number < token))
        before += tl.where(earlier, tl.exp(other - top), 0.0)
    return tl.sum(higher, axis=0), tl.sum(before, axis=0)


@triton.jit
def _mass(source, vocab_size, heat, top, floor, BLOCK: tl.constexpr):
    """Sum of exp(score - top) over the scores from `floor` on."""
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab_size, BLOCK):
        number = first + tl.arange(0, BLOCK)
        score = _scaled(tl.load(source + number, mask=number < vocab_size, other=-float("inf")), heat)
        mass += tl.where(score >= floor, tl.exp(score - top), 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def _redraw(source, vocab_size, heat, key, score, token, BLOCK: tl.constexpr):
    """The token that is best under the noise among those before `token` in the order; -1 where there is none."""
    best, found = -float("inf"), -1
    for first in range(0, vocab_size, BLOCK):
        number = first + tl.arange(0, BLOCK)
        other = _scaled(tl.load(source + number, mask=number < vocab_size, other=-float("inf")), heat)
        earlier = (other > score) | ((other == score) & (number < token))
        noisy = tl.where(earlier, other + _gumbel(key, number), -float("inf"))
        most, where = tl.max(noisy, axis=0, return_indices=True)
        better = most > best
        found = tl.where(better, first + where, found)
        best = tl.where(better, most, best)
    return found


@triton.jit
def _kth_score(source, vocab_size, heat, k, BLOCK: tl.constexpr):
    """The k-th highest score, found eight bits at a time from the highest on."""
    found = tl.full([], 0, tl.uint32)
    digit = tl.arange(0, 256)
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        counts = tl.zeros([256], tl.int32)
        for first in range(0, vocab_size, BLOCK):
            number = first + tl.arange(0, BLOCK)
            logit = tl.load(source + number, mask=number < vocab_size, other=-float("inf"))
            bits = _ordered_bits(_scaled(logit, heat))
            alike = number < vocab_size
            if step > 0:
                alike = alike & ((bits >> (shift + 8)) == (found >> (shift + 8)))
            counts += tl.histogram(((bits >> shift) & 255).to(tl.int32), 256, mask=alike)
        at_least = tl.cumsum(counts, axis=0, reverse=True)
        chosen = tl.max(tl.where(at_least >= k, digit, 0), axis=0)
        k -= tl.sum(tl.where(digit > chosen, counts, 0), axis=0)
        found = found | (chosen.to(tl.uint32) << shift)
    raw = tl.where(found >= 0x80000000, found ^ 0x80000000, found ^ 0xFFFFFFFF)
    return raw.to(tl.float32, bitcast=True)


@triton.jit
def _ordered_bits(score):
    """Unsigned numbers in the order of the floats."""
    bits = score.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >= 0x80000000, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def _row_key(seed, position):
    return _mix(_mix(seed.to(tl.uint64, bitcast=True)) + position.to(tl.uint64, bitcast=True))


@triton.jit
def _gumbel(key, number):
    """The noise of `noise.gumbel_noise` for token ids `number`; its bits are the same, its logarithms nearly so."""
    bits = _mix(key + (number.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    u = tl.minimum(((bits >> 24).to(tl.float32) + 0.5) * 9.094947017729282e-13, 1 - 5.960464477539063e-08)
    # -log(1 - u), by its series where 1 - u would lose the digits of u.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7)))))))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(1 - u)))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
