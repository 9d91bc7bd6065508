"""Prometheus metrics of one engine, under the names that vLLM made common, and those of reloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tokenspeed.runtime.protocol.state import EngineInfo, Loads

# fmt: off
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)
BETWEEN_TOKENS_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
REQUEST_SECONDS = (
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)
PHASE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 600)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REQUEST_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
# fmt: on

RELOAD_PHASES = ("drain", "read", "patch", "warm", "graphs", "total", "held")


@dataclass
class Timing:
    """What is measured of one request; times are seconds of the monotonic clock."""

    arrived: float
    prompt_tokens: int
    max_tokens: int
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    generated: int = 0


class Metrics:
    """A registry of its own, so that several engines of one process do not meet in the global one."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._last_loads = Loads()
        self._make_load_metrics()
        self._make_request_metrics()
        self._make_reload_metrics()

    def _make_load_metrics(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests that are being computed")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait to be admitted")
        self._usage = self._gauge("kv_cache_usage_perc", "Share of the KV blocks that requests hold, 0 to 1")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._preemptions = self._counter("num_preemptions", "Requests that gave their KV blocks to older ones")
        self._step = self._histogram("iteration_tokens_total", "Tokens of one step", STEP_TOKENS)
        self._cache = Gauge(
            "vllm:cache_config_info",
            "The KV cache, in its labels",
            ("model_name", "block_size", "num_gpu_blocks"),
            registry=self.registry,
        )

    def _make_request_metrics(self) -> None:
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
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "First to last token of a request, by the tokens after the first",
            BETWEEN_TOKENS_SECONDS,
        )
        self._request = self._histogram("e2e_request_latency_seconds", "Arrival to end", REQUEST_SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to admission", REQUEST_SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "Admission to first token", REQUEST_SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "First to last token", REQUEST_SECONDS)
        self._inference = self._histogram("request_inference_time_seconds", "Admission to last token", REQUEST_SECONDS)
        self._prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens of a request", REQUEST_TOKENS)
        self._answer_size = self._histogram("request_generation_tokens", "Tokens of an answer", REQUEST_TOKENS)
        self._limit = self._histogram("request_params_max_tokens", "Tokens that a request allows", REQUEST_TOKENS)

    def _make_reload_metrics(self) -> None:
        def labelled(kind: type[Any], name: str, text: str, *labels: str, **more: Any) -> Any:
            return kind(f"tokenspeed:{name}", text, ("model_name", *labels), registry=self.registry, **more)

        self._reloads = labelled(Counter, "reloads", "Reloads by result", "result")
        self._phases = labelled(
            Histogram, "reload_phase_seconds", "Seconds of each phase of a reload", "phase", buckets=PHASE_SECONDS
        )
        self._startup = labelled(Gauge, "startup_seconds", "Seconds of each phase of the start", "phase")
        self._generation = labelled(
            Gauge, "generation", "Number of the generation that serves; a reload raises it"
        ).labels(self._model_name)
        self._replacements = labelled(
            Counter, "rank_replacements", "Times that the ranks were replaced because one was lost"
        ).labels(self._model_name)
        self._compiled = labelled(Counter, "reload_jit_compiled", "Kernels that reloads compiled").labels(
            self._model_name
        )

    def started(self, info: EngineInfo) -> None:
        """Note what does not change any more once the engine is ready."""
        self._cache.labels(self._model_name, str(info.block_size), str(info.num_blocks)).set(1)
        for phase, seconds in info.startup.items():
            self._startup.labels(self._model_name, phase).set(seconds)

    def tokens(self, count: int, timing: Timing, now: float) -> None:
        """Count the tokens of one step of one request, and move `timing` on."""
        if not count:
            return
        self._generated.inc(count)
        timing.generated += count
        if timing.last_token is None:
            timing.first_token = now
            self._prompt.inc(timing.prompt_tokens)
            self._first.observe(now - timing.arrived)
        else:
            self._between.observe(now - timing.last_token)
        timing.last_token = now

    def finished(self, reason: str, timing: Timing, now: float) -> None:
        """Count one request as ended."""
        self._finished.labels(self._model_name, reason).inc()
        self._request.observe(now - timing.arrived)
        self._prompt_size.observe(timing.prompt_tokens)
        self._answer_size.observe(timing.generated)
        self._limit.observe(timing.max_tokens)
        admitted, first, last = timing.admitted, timing.first_token, timing.last_token
        self._queue.observe((now if admitted is None else admitted) - timing.arrived)
        if admitted is None or first is None or last is None:
            return
        self._prefill.observe(first - admitted)
        self._decode.observe(last - first)
        self._inference.observe(last - admitted)
        if timing.generated > 1:
            self._per_token.observe((last - first) / (timing.generated - 1))

    def loads(self, loads: Loads) -> None:
        """Take over what the scheduler reports."""
        self._running.set(loads.running)
        self._waiting.set(loads.waiting)
        self._usage.set(loads.used_blocks / loads.total_blocks if loads.total_blocks else 0.0)
        last = self._last_loads
        self._queries.inc(loads.prefix_queried_tokens - last.prefix_queried_tokens)
        self._hits.inc(loads.prefix_hit_tokens - last.prefix_hit_tokens)
        self._preemptions.inc(loads.preemptions - last.preemptions)
        if loads.steps > last.steps:
            self._step.observe((loads.step_tokens - last.step_tokens) / (loads.steps - last.steps))
        self._last_loads = loads

    def reloaded(self, body: dict[str, Any]) -> None:
        """Count one reload by its reply: `success`, or the code of the failure."""
        result = "success" if body.get("success") else str(body.get("code", "failed"))
        self._reloads.labels(self._model_name, result).inc()
        if "generation" in body:
            self._generation.set(body["generation"])
        self._compiled.inc(body.get("jit", {}).get("compiled", 0))
        seconds = body.get("seconds") or {}
        for phase in RELOAD_PHASES:
            if phase in seconds:
                self._phases.labels(self._model_name, phase).observe(seconds[phase])

    def replaced(self) -> None:
        """Count a replacement of the ranks; the totals of the new scheduler start again."""
        self._replacements.inc()
        self._last_loads = Loads()

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
