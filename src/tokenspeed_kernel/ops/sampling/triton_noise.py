"""`noise.gumbel_noise` in Triton, bit for bit."""

from __future__ import annotations

from tokenspeed_kernel.triton_language import tl, triton


@triton.jit
def row_key(seed, position):
    """What the noise of a row starts from."""
    return _mix(_mix(seed.to(tl.uint64, bitcast=True)) + position.to(tl.uint64, bitcast=True))


@triton.jit
def uniform(key, number):
    """The uniform numbers of `noise.gumbel_noise` for token ids `number`, bit for bit."""
    bits = _mix(key + (number.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    return tl.minimum(((bits >> 24).to(tl.float32) + 0.5) * 9.094947017729282e-13, 1 - 5.960464477539063e-08)


@triton.jit
def gumbel(u):
    """-log(-log(1 - u)); the inner logarithm by its series where 1 - u would lose the digits of u."""
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7)))))))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(1 - u)))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
