"""Sampling in Triton without a sort of the vocabulary.

What top-k, top-p and min-p leave is a head of the order by falling logit. Two ways lead there:

- With top-k the vocabulary is cut to few candidates first. The k-th highest of the maxima of small groups of tokens
  is a bound that at least k tokens reach, and hardly more. These few are sorted, filtered and drawn from.
- Else the token with the most noisy score is drawn first and asked whether it is in the head. If not, neither is any
  token after it in the order, and the draw is repeated among those before it. That ends with the very token that a
  filter before the draw would give, mostly at once: a token that is drawn is likely, and so in the head.

Tokens are ordered by their logits, of equal ones the lower id first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.registry import register_kernel
from tokenspeed_kernel.rounding import cdiv, next_power_of_2
from tokenspeed_kernel.triton_language import DEVICES, tl, triton
from tokenspeed_kernel.triton_run import run_triton
from tokenspeed_kernel.workspace import WORKSPACE

PRIORITY = 10
BLOCK = 2048
"""Tokens of one step of a loop of the first kernel."""
GROUP = 64
"""Tokens of which the first kernel keeps the highest logit."""
PROGRAMS = 1056
"""Programs that fill a GPU in the first pass over the logits."""
MOST_PARTS = 64
WIDE_BLOCK = 8192
"""Tokens of one step of a loop of the second kernel, which has one program a row."""
CANDIDATES = 2048
"""Tokens that the second kernel can sort; a larger top-k is found by drawing again."""


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
    parts = min(max(1, PROGRAMS // rows), MOST_PARTS, cdiv(vocab_size, BLOCK))
    groups = cdiv(vocab_size, GROUP)
    # For each part the best noisy score, its token and two masses; for each group its highest logit; and for each
    # row the groups that hold candidates, and then the candidates.
    drawn, tokens, sums, peaks, room = WORKSPACE.take(
        "sampling.sample.triton",
        logits.device,
        ((rows, MOST_PARTS), torch.float32),
        ((rows, MOST_PARTS), torch.int32),
        ((rows, MOST_PARTS, 2), torch.float32),
        ((rows, groups), torch.float32),
        ((rows, 2, CANDIDATES), torch.int32),
    )
    run_triton(
        draw_kernel,
        (rows, parts),
        logits,
        temperature,
        seeds,
        positions,
        drawn,
        tokens,
        peaks,
        logits.stride(0),
        vocab_size,
        groups,
        MOST_PARTS=MOST_PARTS,
        BLOCK=BLOCK,
        GROUP=GROUP,
        num_warps=8,
    )
    run_triton(
        weigh_kernel,
        (rows, parts),
        logits,
        temperature,
        top_k,
        top_p,
        drawn,
        tokens,
        peaks,
        sums,
        logits.stride(0),
        vocab_size,
        groups,
        MOST_PARTS=MOST_PARTS,
        BLOCK=BLOCK,
        BLOCK_GROUPS=next_power_of_2(groups),
        num_warps=8,
    )
    run_triton(
        accept_kernel,
        (rows,),
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        drawn,
        tokens,
        peaks,
        sums,
        room,
        out,
        logits.stride(0),
        vocab_size,
        groups,
        parts,
        MOST_PARTS=MOST_PARTS,
        BLOCK=min(WIDE_BLOCK, next_power_of_2(vocab_size)),
        BLOCK_GROUPS=next_power_of_2(groups),
        GROUP=GROUP,
        CANDIDATES=CANDIDATES,
        num_warps=16,
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
    peaks,
    logits_stride,
    vocab_size,
    groups,
    MOST_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The best token of one part of a row: under the noise, or by its logit where the row is greedy."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    heat = tl.load(temperature + row)
    key = _row_key(tl.load(seeds + row), tl.load(positions + row))
    share = tl.cdiv(tl.cdiv(vocab_size, tl.num_programs(1)), BLOCK) * BLOCK
    begin = part * share
    end = tl.minimum(begin + share, vocab_size)
    source = logits + row * logits_stride
    best, token = -float("inf"), begin
    for first in range(begin, end, BLOCK):
        number = first + tl.arange(0, BLOCK)
        logit = tl.load(source + number, mask=number < end, other=-float("inf"))
        group = first // GROUP + tl.arange(0, BLOCK // GROUP)
        peak = tl.max(tl.reshape(logit, [BLOCK // GROUP, GROUP]), axis=1)
        tl.store(peaks + row * groups + group, peak, mask=group < groups)
        if heat > 0:
            best, token = _draw(logit, heat, key, number, best, token)
        else:
            most, where = tl.max(logit, axis=0, return_indices=True)
            better = most > best
            token = tl.where(better, first + where, token)
            best = tl.where(better, most, best)
    # A part without tokens stands behind all others.
    tl.store(drawn + row * MOST_PARTS + part, best)
    tl.store(tokens + row * MOST_PARTS + part, tl.minimum(token, vocab_size - 1))


@triton.jit
def weigh_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    drawn,
    tokens,
    peaks,
    sums,
    logits_stride,
    vocab_size,
    groups,
    MOST_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """For rows with top-p alone the mass of one part: before the token that was drawn, and in all."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    if heat <= 0 or tl.load(top_p + row) >= 1 or (k > 0 and k < vocab_size):
        return
    source = logits + row * logits_stride
    token = _merged(drawn + row * MOST_PARTS, tokens + row * MOST_PARTS, tl.num_programs(1), MOST_PARTS)
    number = tl.arange(0, BLOCK_GROUPS)
    top = tl.max(tl.load(peaks + row * groups + number, mask=number < groups, other=-float("inf")), axis=0)
    share = tl.cdiv(tl.cdiv(vocab_size, tl.num_programs(1)), BLOCK) * BLOCK
    begin = part * share
    end = tl.minimum(begin + share, vocab_size)
    floor = tl.full([], -float("inf"), tl.float32)
    before, total = _mass(source, begin, end, heat, top, floor, tl.load(source + token), token, BLOCK)
    tl.store(sums + (row * MOST_PARTS + part) * 2, before)
    tl.store(sums + (row * MOST_PARTS + part) * 2 + 1, total)


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
    peaks,
    sums,
    room,
    out,
    logits_stride,
    vocab_size,
    groups,
    parts,
    MOST_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Merge the parts of a row, and find the token that the filters leave."""
    row = tl.program_id(0).to(tl.int64)
    token = _merged(drawn + row * MOST_PARTS, tokens + row * MOST_PARTS, parts, MOST_PARTS)
    heat = tl.load(temperature + row)
    k, p, least_p = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    k = tl.where(k >= vocab_size, 0, k).to(tl.int32)
    if heat > 0 and (k > 0 or p < 1 or least_p > 0):
        source = logits + row * logits_stride
        key = _row_key(tl.load(seeds + row), tl.load(positions + row))
        number = tl.arange(0, BLOCK_GROUPS)
        peak = tl.load(peaks + row * groups + number, mask=number < groups, other=-float("inf"))
        top = tl.max(peak, axis=0)
        least = tl.full([], -float("inf"), tl.float32)
        if least_p > 0:
            least = top + tl.log(least_p) * heat
        count = CANDIDATES + 1
        if k > 0 and k <= groups:
            bound = _kth(peak, number < groups, k)
            near = (number < groups) & (peak >= bound)
            count = _collect(source, vocab_size, bound, near, room + row * 2 * CANDIDATES, GROUP, CANDIDATES)
        if count <= CANDIDATES:
            found = room + (row * 2 + 1) * CANDIDATES
            token = _draw_from(source, found, count, heat, key, k, p, least, top, CANDIDATES)
        else:
            before, total = top * 0.0, top * 0.0
            if k <= 0 and p < 1:
                part = tl.arange(0, MOST_PARTS)
                sum_of_part = sums + (row * MOST_PARTS + part) * 2
                before = tl.sum(tl.load(sum_of_part, mask=part < parts, other=0.0), axis=0)
                total = tl.sum(tl.load(sum_of_part + 1, mask=part < parts, other=0.0), axis=0)
            token = _draw_again(source, vocab_size, heat, key, k, p, least, top, token, before, total, BLOCK)
    tl.store(out + row, token.to(tl.int64))


@triton.jit
def _merged(drawn, tokens, parts, MOST_PARTS: tl.constexpr):
    """The best token of all parts of a row."""
    part = tl.arange(0, MOST_PARTS)
    _, where = tl.max(tl.load(drawn + part, mask=part < parts, other=-float("inf")), axis=0, return_indices=True)
    return tl.load(tokens + where)


@triton.jit
def _draw(logit, heat, key, number, best, token):
    """The better of `token` and the best of a block under the noise.

    Noise is at most -log(u) of its uniform number u. So a token can win only where u < exp(score - best), and most
    blocks have none: they are spared the logarithms.
    """
    u = _uniform(key, number)
    may_win = u < tl.exp(logit / heat - best) * 1.01
    if tl.max(may_win.to(tl.int32), axis=0) > 0:
        # Rounded as torch divides.
        noisy = tl.where(may_win, tl.math.div_rn(logit, heat) + _gumbel(u), -float("inf"))
        most, where = tl.max(noisy, axis=0, return_indices=True)
        winner = tl.max(tl.where(tl.arange(0, number.shape[0]) == where, number, -1), axis=0)
        better = most > best
        token = tl.where(better, winner, token)
        best = tl.where(better, most, best)
    return best, token


@triton.jit
def _draw_again(source, vocab_size, heat, key, k, p, least, top, token, before, total, BLOCK: tl.constexpr):
    """Ask `token`, and draw among those before it in the order until one is in the head.

    `before` and `total` are the masses for `token` if they are known; a `total` of 0 says that they are not.
    """
    floor = tl.full([], -float("inf"), tl.float32)
    if k > 0:
        floor = _kth_of_all(source, vocab_size, k, BLOCK)
    least = tl.maximum(least, floor)
    accepted = heat <= 0
    while not accepted:
        logit = tl.load(source + token)
        # A draw below `least` is refused without counting.
        is_low = logit < least
        if p < 1 and not is_low and not total > 0:
            before, total = _mass(source, 0, vocab_size, heat, top, floor, logit, token, BLOCK)
        accepted = (not is_low) & ((p >= 1) | (before < p * total) | (before <= 0))
        # What is no number accepts nothing, and must not loop for ever.
        accepted = accepted | (logit != logit) | (top != top) | (top == float("inf"))
        if not accepted:
            best, again = -float("inf"), -1
            for first in range(0, vocab_size, BLOCK):
                number = first + tl.arange(0, BLOCK)
                other = tl.load(source + number, mask=number < vocab_size, other=-float("inf"))
                earlier = (other > logit) | ((other == logit) & (number < token))
                other = tl.where(earlier & (other >= least), other, -float("inf"))
                best, again = _draw(other, heat, key, number, best, again)
            accepted = again < 0
            token = tl.where(accepted, token, again)
            total = total * 0.0
    return token


@triton.jit
def _mass(source, begin, end, heat, top, floor, logit, token, BLOCK: tl.constexpr):
    """Sums of exp(score - top) over ids from `begin` to `end`: of the tokens before `token` in the order, and of all
    whose logits reach `floor`."""
    before = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    scale = 1 / heat
    for first in range(begin, end, BLOCK):
        number = first + tl.arange(0, BLOCK)
        other = tl.load(source + number, mask=number < end, other=-float("inf"))
        mass = tl.where(other >= floor, tl.exp((other - top) * scale), 0.0)
        earlier = (other > logit) | ((other == logit) & (number < token))
        before += tl.where(earlier, mass, 0.0)
        total += mass
    return tl.sum(before, axis=0), tl.sum(total, axis=0)


@triton.jit
def _collect(source, vocab_size, bound, near, room, GROUP: tl.constexpr, CANDIDATES: tl.constexpr):
    """Write the tokens whose logits reach `bound`, all of which are in the groups `near`, to the second half of
    `room`, in order of id; returns how many there are."""
    CHUNK: tl.constexpr = 32
    order = tl.cumsum(near.to(tl.int32), axis=0) - 1
    held = tl.sum(near.to(tl.int32), axis=0)
    tl.store(room + order, tl.arange(0, near.shape[0]), mask=near & (order < CANDIDATES))
    tl.debug_barrier()
    count = tl.where(held > CANDIDATES, CANDIDATES + 1, 0)
    last = tl.minimum(held, CANDIDATES)
    for first in range(0, last, CHUNK):
        index = first + tl.arange(0, CHUNK)
        group = tl.load(room + index, mask=index < last, other=0)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (index < last)[:, None] & (token < vocab_size)
        reached = inside & (tl.load(source + token, mask=inside, other=-float("inf")) >= bound)
        reached = tl.reshape(reached.to(tl.int32), [CHUNK * GROUP])
        token = tl.reshape(token, [CHUNK * GROUP])
        place = count + tl.cumsum(reached, axis=0) - 1
        tl.store(room + CANDIDATES + place, token, mask=(reached > 0) & (place < CANDIDATES))
        count += tl.sum(reached, axis=0)
    tl.debug_barrier()
    return count


@triton.jit
def _draw_from(source, room, count, heat, key, k, p, least, top, CANDIDATES: tl.constexpr):
    """Filter the candidates in `room`, and draw."""
    place = tl.arange(0, CANDIDATES)
    inside = place < count
    number = tl.load(room + place, mask=inside, other=0)
    logit = tl.load(source + number, mask=inside, other=-float("inf"))
    inside = inside & (logit >= _kth(logit, inside, k))
    mass = tl.where(inside, tl.exp((logit - top) / heat), 0.0)
    total = tl.sum(mass, axis=0)
    u = _uniform(key, number)
    noisy = tl.where(inside & (logit >= least), tl.math.div_rn(logit, heat) + _gumbel(u), -float("inf"))
    token = -1
    accepted = heat <= 0
    while not accepted:
        most, where = tl.max(noisy, axis=0, return_indices=True)
        token = tl.sum(tl.where(place == where, number, 0), axis=0)
        chosen = tl.max(tl.where(place == where, logit, -float("inf")), axis=0)
        earlier = (logit > chosen) | ((logit == chosen) & (number < token))
        before = tl.sum(tl.where(earlier, mass, 0.0), axis=0)
        accepted = (p >= 1) | (before < p * total) | (before <= 0) | (most == -float("inf")) | (total != total)
        noisy = tl.where(earlier, noisy, -float("inf"))
    return token


@triton.jit
def _kth(value, inside, k):
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
def _kth_of_all(source, vocab_size, k, BLOCK: tl.constexpr):
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


@triton.jit
def _row_key(seed, position):
    return _mix(_mix(seed.to(tl.uint64, bitcast=True)) + position.to(tl.uint64, bitcast=True))


@triton.jit
def _uniform(key, number):
    """The uniform numbers of `noise.gumbel_noise` for token ids `number`, bit for bit."""
    bits = _mix(key + (number.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    return tl.minimum(((bits >> 24).to(tl.float32) + 0.5) * 9.094947017729282e-13, 1 - 5.960464477539063e-08)


@triton.jit
def _gumbel(u):
    """-log(-log(1 - u)); the inner logarithm by its series where 1 - u would lose the digits of u."""
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7)))))))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(1 - u)))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
