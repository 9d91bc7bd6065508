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

from tokenspeed_kernel.ops.sampling.triton_draw import collect, draw, draw_again, draw_from, mass_before, merged
from tokenspeed_kernel.ops.sampling.triton_noise import row_key
from tokenspeed_kernel.ops.sampling.triton_order import kth_highest
from tokenspeed_kernel.registry import register_kernel
from tokenspeed_kernel.rounding import cdiv, next_power_of_2
from tokenspeed_kernel.triton_language import TRITON, tl, triton
from tokenspeed_kernel.triton_run import run_triton
from tokenspeed_kernel.workspace import WORKSPACE

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


@register_kernel(
    "sampling",
    "sample",
    **TRITON,
    dtypes=(torch.float32,),
)
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
    found = drawn, tokens, peaks
    sizes = logits.stride(0), vocab_size, groups
    blocks = {"MOST_PARTS": MOST_PARTS, "BLOCK_GROUPS": next_power_of_2(groups)}
    run_triton(
        draw_kernel,
        (rows, parts),
        logits,
        temperature,
        seeds,
        positions,
        *found,
        *sizes,
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
        *found,
        sums,
        *sizes,
        **blocks,
        BLOCK=BLOCK,
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
        *found,
        sums,
        room,
        out,
        *sizes,
        parts,
        **blocks,
        BLOCK=min(WIDE_BLOCK, next_power_of_2(vocab_size)),
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
    key = row_key(tl.load(seeds + row), tl.load(positions + row))
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
            best, token = draw(logit, heat, key, number, best, token)
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
    token = merged(drawn + row * MOST_PARTS, tokens + row * MOST_PARTS, tl.num_programs(1), MOST_PARTS)
    number = tl.arange(0, BLOCK_GROUPS)
    top = tl.max(tl.load(peaks + row * groups + number, mask=number < groups, other=-float("inf")), axis=0)
    share = tl.cdiv(tl.cdiv(vocab_size, tl.num_programs(1)), BLOCK) * BLOCK
    begin = part * share
    end = tl.minimum(begin + share, vocab_size)
    floor = tl.full([], -float("inf"), tl.float32)
    before, total = mass_before(source, begin, end, heat, top, floor, tl.load(source + token), token, BLOCK)
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
    token = merged(drawn + row * MOST_PARTS, tokens + row * MOST_PARTS, parts, MOST_PARTS)
    heat = tl.load(temperature + row)
    k, p, least_p = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    k = tl.where(k >= vocab_size, 0, k).to(tl.int32)
    if heat > 0 and (k > 0 or p < 1 or least_p > 0):
        source = logits + row * logits_stride
        key = row_key(tl.load(seeds + row), tl.load(positions + row))
        number = tl.arange(0, BLOCK_GROUPS)
        peak = tl.load(peaks + row * groups + number, mask=number < groups, other=-float("inf"))
        top = tl.max(peak, axis=0)
        least = tl.full([], -float("inf"), tl.float32)
        if least_p > 0:
            least = top + tl.log(least_p) * heat
        count = CANDIDATES + 1
        if k > 0 and k <= groups:
            bound = kth_highest(peak, number < groups, k)
            near = (number < groups) & (peak >= bound)
            count = collect(source, vocab_size, bound, near, room + row * 2 * CANDIDATES, GROUP, CANDIDATES)
        if count <= CANDIDATES:
            found = room + (row * 2 + 1) * CANDIDATES
            token = draw_from(source, found, count, heat, key, k, p, least, top, CANDIDATES)
        else:
            before, total = top * 0.0, top * 0.0
            if k <= 0 and p < 1:
                part = tl.arange(0, MOST_PARTS)
                sum_of_part = sums + (row * MOST_PARTS + part) * 2
                before = tl.sum(tl.load(sum_of_part, mask=part < parts, other=0.0), axis=0)
                total = tl.sum(tl.load(sum_of_part + 1, mask=part < parts, other=0.0), axis=0)
            token = draw_again(source, vocab_size, heat, key, k, p, least, top, token, before, total, BLOCK)
    tl.store(out + row, token.to(tl.int64))
