"""Prometheus metrics of one engine, under the names that vLLM made common, and those of reloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from tokenspeed.runtime.protocol import Loads

FIRST_TOKEN_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
BETWEEN_TOKENS_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
)
REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
PHASE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 600)

RELOAD_PHASES = ("drain", "read", "patch", "warm", "graphs", "total", "held")


@dataclass
class Timing:
    """When a request came and when its last token did, in seconds of the monotonic clock."""

    arrived: float
    prompt_tokens: int
    last_token: float | None = None


class Metrics:
    """A registry of its own, so that several engines of one process do not meet in the global one."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._running = self._gauge("num_requests_running", "Requests that are being computed")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait to be admitted")
        self._usage = self._gauge("kv_cache_usage_perc", "Share of the KV blocks that requests hold, 0 to 1")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens processed")
        self._generated = self._counter("generation_tokens", "Tokens generated")
        self._finished = Counter(
            "vllm:request_success",
            "Requests by how they ended",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._first = self._histogram("time_to_first_token_seconds", "Arrival to first token", FIRST_TOKEN_SECONDS)
        self._between = self._histogram(
            "inter_token_latency_seconds", "Between two steps of a request", BETWEEN_TOKENS_SECONDS
        )
        self._request = self._histogram("e2e_request_latency_seconds", "Arrival to last token", REQUEST_SECONDS)
        self._reloads = Counter(
            "tokenspeed:reloads", "Reloads by result", ("model_name", "result"), registry=self.registry
        )
        self._phases = Histogram(
            "tokenspeed:reload_phase_seconds",
            "Seconds of each phase of a reload",
            ("model_name", "phase"),
            buckets=PHASE_SECONDS,
            registry=self.registry,
        )
        self._last_loads = Loads()

    def tokens(self, count: int, timing: Timing, now: float) -> None:
        """Count the tokens of one step of one request, and move `timing` on."""
        if not count:
            return
        self._generated.inc(count)
        if timing.last_token is None:
            self._prompt.inc(timing.prompt_tokens)
            self._first.observe(now - timing.arrived)
        else:
            self._between.observe(now - timing.last_token)
        timing.last_token = now

    def finished(self, reason: str, timing: Timing, now: float) -> None:
        """Count one request as ended."""
        self._finished.labels(self._model_name, reason).inc()
        self._request.observe(now - timing.arrived)

    def loads(self, loads: Loads) -> None:
        """Take over what the scheduler reports; its totals start again when a rank was replaced."""
        self._running.set(loads.running)
        self._waiting.set(loads.waiting)
        self._usage.set(loads.used_blocks / loads.total_blocks if loads.total_blocks else 0.0)
        last = self._last_loads
        self._queries.inc(max(0, loads.prefix_queried_tokens - last.prefix_queried_tokens))
        self._hits.inc(max(0, loads.prefix_hit_tokens - last.prefix_hit_tokens))
        self._last_loads = loads

    def reloaded(self, body: dict[str, Any]) -> None:
        """Count one reload by its reply: `success`, or the code of the failure."""
        result = "success" if body.get("success") else str(body.get("code", "failed"))
        self._reloads.labels(self._model_name, result).inc()
        seconds = body.get("seconds") or {}
        for phase in RELOAD_PHASES:
            if phase in seconds:
                self._phases.labels(self._model_name, phase).observe(seconds[phase])

    def exposition(self) -> tuple[bytes, str]:
        """All metrics in Prometheus' text format, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, ("model_name",), registry=self.registry).labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, ("model_name",), registry=self.registry).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, ("model_name",), buckets=buckets, registry=self.registry)
        return histogram.labels(self._model_name)
