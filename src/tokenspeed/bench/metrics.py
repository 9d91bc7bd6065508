"""From the results of requests to the figures of a benchmark, under the names that `vllm bench serve` saves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokenspeed.bench.client import RequestResult

Figures = dict[str, Any]

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
"""What is measured of each request, in milliseconds."""


def figures(
    results: Sequence[RequestResult],
    duration: float,
    *,
    percentiles: Sequence[float] = (99.0,),
    metrics: Sequence[str] = tuple(METRICS),
    goodput: Mapping[str, float] | None = None,
) -> Figures:
    """Totals, rates, and the distribution of each metric over the successful requests.

    Args:
        results: one a request.
        duration: seconds from the first request to the last answer.
        percentiles: between 0 and 100.
        metrics: of `METRICS`.
        goodput: bounds in milliseconds by metric; a request within all of them is good.
    """
    good = [result for result in results if result.success]
    outputs = sum(result.output_len for result in good)
    inputs = sum(result.prompt_len for result in good)
    told: Figures = {
        "duration": duration,
        "completed": len(good),
        "failed": len(results) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / duration,
        "request_goodput": _within(good, goodput) / duration if goodput else None,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "max_output_tokens_per_s": peak_tokens_per_second(good),
        "max_concurrent_requests": peak_concurrency(good),
    }
    for metric in metrics:
        told |= distribution(metric, milliseconds(metric, good), percentiles)
    return told


def milliseconds(metric: str, results: Sequence[RequestResult]) -> list[float]:
    """The values of one metric; `tpot` leaves out answers of one token, and `itl` has one for each gap."""
    match metric:
        case "ttft":
            values = [result.ttft for result in results]
        case "tpot":
            values = [time_per_token(result) for result in results if result.output_len > 1]
        case "itl":
            values = [gap for result in results for gap in result.itls]
        case "e2el":
            values = [result.latency for result in results]
        case _:
            raise ValueError(f"{metric} is none of {', '.join(METRICS)}")
    return [value * 1000 for value in values]


def time_per_token(result: RequestResult) -> float:
    """Seconds for each token after the first; 0 where there is none."""
    return (result.latency - result.ttft) / (result.output_len - 1) if result.output_len > 1 else 0.0


def distribution(metric: str, values: Sequence[float], percentiles: Sequence[float]) -> Figures:
    """Mean, median, standard deviation and percentiles of `values`; zeros without any."""
    data = np.asarray(values if len(values) else [0.0])
    told = {
        f"mean_{metric}_ms": float(data.mean()),
        f"median_{metric}_ms": float(np.median(data)),
        f"std_{metric}_ms": float(data.std()),
    }
    return told | {f"p{p:g}_{metric}_ms": float(np.percentile(data, p)) for p in percentiles}


def peak_concurrency(results: Sequence[RequestResult]) -> int:
    """Most requests that were open at one moment."""
    begins = [(result.started, 1) for result in results]
    ends = [(result.started + result.latency, -1) for result in results]
    open_now = most = 0
    for _, change in sorted([*begins, *ends]):  # an end sorts before a begin at the same moment
        open_now += change
        most = max(most, open_now)
    return most


def peak_tokens_per_second(results: Sequence[RequestResult]) -> float:
    """Most texts that came within one of the seconds after the first request, each taken as one token."""
    if not results:
        return 0.0
    first = min(result.started for result in results)
    seconds: dict[int, int] = {}
    for result in results:
        moment = result.started + result.ttft
        for gap in (0.0, *result.itls):
            moment += gap
            second = math.floor(moment - first)
            seconds[second] = seconds.get(second, 0) + 1
    return float(max(seconds.values()))


def _within(results: Sequence[RequestResult], bounds: Mapping[str, float]) -> int:
    def good(result: RequestResult) -> bool:
        told = {"ttft": result.ttft, "tpot": time_per_token(result), "e2el": result.latency}
        return all(told[metric] * 1000 <= bound for metric, bound in bounds.items())

    return sum(map(good, results))
