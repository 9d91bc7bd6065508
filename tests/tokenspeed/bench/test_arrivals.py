"""Arrivals have the rate that was asked for, and the spread."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from tokenspeed.bench.arrivals import arrival_times


def gaps(burstiness: float) -> np.ndarray:  # type: ignore[type-arg]
    times = arrival_times(4000, 50.0, burstiness, np.random.default_rng(0))
    return np.array([after - before for before, after in pairwise(times)])


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 8.0])
def test_the_last_request_comes_when_the_rate_says(burstiness: float) -> None:
    times = arrival_times(100, 4.0, burstiness, np.random.default_rng(1))
    assert times == sorted(times) and times[0] >= 0
    assert times[-1] == pytest.approx(25.0)


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 8.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    measured = gaps(burstiness)
    # Of a gamma distribution: mean squared over variance is the shape.
    assert measured.mean() ** 2 / measured.var() == pytest.approx(burstiness, rel=0.15)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, np.random.default_rng(0)) == [0.0, 0.0, 0.0]


def test_nothing_arrives_without_requests() -> None:
    assert arrival_times(0, 1.0, 1.0, np.random.default_rng(0)) == []
