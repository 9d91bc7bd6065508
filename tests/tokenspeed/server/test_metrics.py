from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tokenspeed.runtime.protocol import Loads
from tokenspeed.server.metrics import Metrics, Timing


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model_name": "m", **labels})


def test_a_request_shows_in_counters_and_latencies() -> None:
    metrics, timing = Metrics("m"), Timing(arrived=10.0, prompt_tokens=7)
    metrics.tokens(0, timing, 10.1)
    metrics.tokens(1, timing, 10.5)
    metrics.tokens(2, timing, 10.75)
    metrics.finished("stop", timing, 11.0)

    assert value(metrics, "vllm:prompt_tokens_total") == 7
    assert value(metrics, "vllm:generation_tokens_total") == 3
    assert value(metrics, "vllm:time_to_first_token_seconds_sum") == 0.5
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == 0.25
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == 1.0
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1


def test_loads_become_gauges_and_their_totals_survive_a_new_rank() -> None:
    metrics = Metrics("m")
    for queried, hit in ((10, 4), (15, 5), (3, 1), (6, 2)):
        metrics.loads(
            Loads(
                running=2,
                waiting=1,
                used_blocks=5,
                total_blocks=20,
                prefix_queried_tokens=queried,
                prefix_hit_tokens=hit,
            )
        )
    assert value(metrics, "vllm:num_requests_running") == 2
    assert value(metrics, "vllm:num_requests_waiting") == 1
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    assert value(metrics, "vllm:prefix_cache_queries_total") == 18
    assert value(metrics, "vllm:prefix_cache_hits_total") == 6


def test_reloads_are_counted_by_result_and_timed_by_phase() -> None:
    metrics = Metrics("m")
    metrics.reloaded({"success": True, "seconds": {"drain": 0.5, "total": 1.5, "held": 1.0}})
    metrics.reloaded({"success": False, "code": "timeout"})
    assert value(metrics, "tokenspeed:reloads_total", result="success") == 1
    assert value(metrics, "tokenspeed:reloads_total", result="timeout") == 1
    assert value(metrics, "tokenspeed:reload_phase_seconds_sum", phase="total") == 1.5


def test_the_exposition_is_prometheus_text() -> None:
    content, content_type = Metrics("m").exposition()
    assert content_type.startswith("text/plain")
    assert "vllm:num_requests_running" in {f.name for f in text_string_to_metric_families(content.decode())}
