"""Draws of one row of logits, and what its filters leave of them: functions of the sampling kernels."""

from __future__ import annotations

from tokenspeed_kernel.ops.sampling.triton_noise import gumbel, uniform
from tokenspeed_kernel.ops.sampling.triton_order import kth_highest, kth_highest_of_row
from tokenspeed_kernel.triton_language import tl, triton


@triton.jit
def merged(drawn, tokens, parts, MOST_PARTS: tl.constexpr):
    """The best token of all parts of a row."""
    part = tl.arange(0, MOST_PARTS)
    _, where = tl.max(tl.load(drawn + part, mask=part < parts, other=-float("inf")), axis=0, return_indices=True)
    return tl.load(tokens + where)


@triton.jit
def draw(logit, heat, key, number, best, token):
    """The better of `token` and the best of a block under the noise.

    Noise is at most -log(u) of its uniform number u. So a token can win only where u < exp(score - best), and most
    blocks have none: they are spared the logarithms.
    """
    u = uniform(key, number)
    may_win = u < tl.exp(logit / heat - best) * 1.01
    if tl.max(may_win.to(tl.int32), axis=0) > 0:
        # Rounded as torch divides.
        noisy = tl.where(may_win, tl.math.div_rn(logit, heat) + gumbel(u), -float("inf"))
        most, where = tl.max(noisy, axis=0, return_indices=True)
        winner = tl.max(tl.where(tl.arange(0, number.shape[0]) == where, number, -1), axis=0)
        better = most > best
        token = tl.where(better, winner, token)
        best = tl.where(better, most, best)
    return best, token


@triton.jit
def draw_again(source, vocab_size, heat, key, k, p, least, top, token, before, total, BLOCK: tl.constexpr):
    """Ask `token`, and draw among those before it in the order until one is in the head.

    `before` and `total` are the masses for `token` if they are known; a `total` of 0 says that they are not.
    """
    floor = tl.full([], -float("inf"), tl.float32)
    if k > 0:
        floor = kth_highest_of_row(source, vocab_size, k, BLOCK)
    least = tl.maximum(least, floor)
    accepted = heat <= 0
    while not accepted:
        logit = tl.load(source + token)
        # A draw below `least` is refused without counting.
        is_low = logit < least
        if p < 1 and not is_low and not total > 0:
            before, total = mass_before(source, 0, vocab_size, heat, top, floor, logit, token, BLOCK)
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
                best, again = draw(other, heat, key, number, best, again)
            accepted = again < 0
            token = tl.where(accepted, token, again)
            total = total * 0.0
    return token


@triton.jit
def mass_before(source, begin, end, heat, top, floor, logit, token, BLOCK: tl.constexpr):
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
def collect(source, vocab_size, bound, near, room, GROUP: tl.constexpr, CANDIDATES: tl.constexpr):
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
def draw_from(source, room, count, heat, key, k, p, least, top, CANDIDATES: tl.constexpr):
    """Filter the candidates in `room`, and draw."""
    place = tl.arange(0, CANDIDATES)
    inside = place < count
    number = tl.load(room + place, mask=inside, other=0)
    logit = tl.load(source + number, mask=inside, other=-float("inf"))
    inside = inside & (logit >= kth_highest(logit, inside, k))
    mass = tl.where(inside, tl.exp((logit - top) / heat), 0.0)
    total = tl.sum(mass, axis=0)
    u = uniform(key, number)
    noisy = tl.where(inside & (logit >= least), tl.math.div_rn(logit, heat) + gumbel(u), -float("inf"))
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
