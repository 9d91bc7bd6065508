"""When requests are sent."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Seconds after the start at which each request is sent.

    The gaps are gamma distributed with shape `burstiness`: 1 is a Poisson process, less is burstier, more is more
    even. They are scaled so that the last request is sent at `count / rate`: the rate is what was asked for.

    Args:
        count: number of requests.
        rate: requests a second; infinity sends all at once.
        burstiness: shape, above 0.
        rng: source of chance.
    """
    if math.isinf(rate):
        return [0.0] * count
    times = rng.gamma(shape=burstiness, scale=1 / (rate * burstiness), size=count).cumsum()
    scaled: list[float] = (times * (count / rate / times[-1])).tolist() if count and times[-1] > 0 else times.tolist()
    return scaled
