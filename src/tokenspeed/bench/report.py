"""Figures for people, and the file for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenspeed.bench.metrics import METRICS
from tokenspeed.errors import ResourceError

WIDTH = 50

TOTALS = (
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("Maximum request concurrency:", "max_concurrency"),
    ("Request rate configured (RPS):", "request_rate"),
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Request goodput (req/s):", "request_goodput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
    ("Peak concurrent requests:", "max_concurrent_requests"),
    ("Total token throughput (tok/s):", "total_token_throughput"),
)


def table(summary: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The figures of `ts bench serve` as lines, in the order in which `vllm bench serve` prints them."""
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    lines += [_line(label, summary[key]) for label, key in TOTALS if summary[key] is not None]
    for metric in metrics:
        lines.append(METRICS[metric].center(WIDTH, "-"))
        name = metric.upper()
        lines.append(_line(f"Mean {name} (ms):", summary[f"mean_{metric}_ms"]))
        lines.append(_line(f"Median {name} (ms):", summary[f"median_{metric}_ms"]))
        lines += [_line(f"P{p:g} {name} (ms):", summary[f"p{p:g}_{metric}_ms"]) for p in percentiles]
    return "\n".join([*lines, "=" * WIDTH])


def default_name(summary: Mapping[str, Any]) -> str:
    """The file name that `vllm bench serve` gives a result."""
    concurrency = summary["max_concurrency"]
    limit = f"-concurrency{concurrency}" if concurrency is not None else ""
    model = str(summary["model_id"]).rstrip("/").rpartition("/")[2]
    return f"{summary['backend']}-{float(summary['request_rate'])}qps{limit}-{model}-{summary['date']}.json"


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result as JSON, making the directory.

    Raises:
        ResourceError: when that is not possible.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=4) + "\n", encoding="utf-8")
    except OSError as error:
        raise ResourceError(
            f"the result cannot be written to {path} ({error.strerror}); choose another place"
        ) from error


def _line(label: str, value: Any) -> str:
    told = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<{WIDTH - 10}}{told:>10}"
