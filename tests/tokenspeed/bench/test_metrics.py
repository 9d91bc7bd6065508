"""The arithmetic of the figures, on results that are known by heart."""

from __future__ import annotations

import pytest

from tokenspeed.bench.client import RequestResult
from tokenspeed.bench.metrics import distribution, figures, milliseconds, peak_concurrency, peak_tokens_per_second


def result(started: float, ttft: float, itls: list[float], *, prompt_len: int = 10) -> RequestResult:
    """A request whose answer has one token a text."""
    return RequestResult(
        started=started,
        success=True,
        prompt_len=prompt_len,
        output_len=1 + len(itls),
        ttft=ttft,
        itls=itls,
        latency=ttft + sum(itls),
    )


RESULTS = [
    result(100.0, 0.2, [0.1, 0.3]),
    result(100.5, 0.4, [0.2]),
    result(101.0, 0.6, []),
    RequestResult(started=101.0, error="500", prompt_len=10),
]


def test_totals_and_rates_count_what_succeeded() -> None:
    told = figures(RESULTS, duration=2.0)
    assert (told["completed"], told["failed"]) == (3, 1)
    assert (told["total_input_tokens"], told["total_output_tokens"]) == (30, 6)
    assert told["request_throughput"] == 1.5
    assert told["output_throughput"] == 3.0
    assert told["total_token_throughput"] == 18.0
    assert told["request_goodput"] is None


def test_each_metric_has_its_values_in_milliseconds() -> None:
    good = RESULTS[:3]
    assert milliseconds("ttft", good) == pytest.approx([200, 400, 600])
    assert milliseconds("tpot", good) == pytest.approx([200, 200])  # an answer of one token has none
    assert milliseconds("itl", good) == pytest.approx([100, 300, 200])
    assert milliseconds("e2el", good) == pytest.approx([600, 600, 600])
    with pytest.raises(ValueError, match="none of ttft"):
        milliseconds("tft", good)


def test_a_distribution_has_mean_median_deviation_and_percentiles() -> None:
    told = distribution("ttft", [1.0, 2.0, 3.0, 6.0], [50, 99, 99.9])
    assert told == {
        "mean_ttft_ms": 3.0,
        "median_ttft_ms": 2.5,
        "std_ttft_ms": pytest.approx(3.5**0.5),
        "p50_ttft_ms": 2.5,
        "p99_ttft_ms": pytest.approx(5.91),
        "p99.9_ttft_ms": pytest.approx(5.991),
    }
    assert set(distribution("itl", [], [99]).values()) == {0.0}


def test_goodput_counts_requests_within_every_bound() -> None:
    def rate(**bounds: float) -> float:
        value: float = figures(RESULTS, duration=2.0, goodput=bounds)["request_goodput"]
        return value

    assert rate(ttft=1000) == 1.5
    assert rate(ttft=400) == 1.0
    assert rate(ttft=400, tpot=200, e2el=599) == 0.0
    assert rate(tpot=199) == 0.5  # the answer of one token has no time per token that could be too long
    assert rate(ttft=200, tpot=201) == 0.5


def test_only_the_metrics_that_were_asked_for_are_told() -> None:
    told = figures(RESULTS, 1.0, metrics=["itl"], percentiles=[90])
    assert {name for name in told if name.endswith("_ms")} == {
        f"{part}_itl_ms" for part in ("mean", "median", "std", "p90")
    }


def test_the_peak_of_concurrency_is_exact() -> None:
    assert peak_concurrency([]) == 0
    assert peak_concurrency(RESULTS[:3]) == 2
    after = [result(0.0, 1.0, []), result(1.0, 1.0, []), result(2.0, 1.0, [])]
    assert peak_concurrency(after) == 1
    assert peak_concurrency([*after, result(0.5, 9.0, [])]) == 2


def test_the_peak_of_tokens_looks_at_whole_seconds() -> None:
    assert peak_tokens_per_second([]) == 0
    assert peak_tokens_per_second([result(5.0, 0.1, [0.2] * 4 + [0.5, 0.5])]) == 5
    assert peak_tokens_per_second([result(5.0, 0.1, []), result(5.9, 0.05, []), result(6.0, 0.1, [])]) == 2
