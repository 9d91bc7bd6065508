from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.tokenspeed.server.engine_info import engine_info
from tokenspeed.runtime.protocol.state import Loads
from tokenspeed.server.metrics import Metrics, Timing


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model_name": "m", **labels})


def test_a_request_shows_in_counters_and_latencies() -> None:
    metrics, timing = Metrics("m"), Timing(arrived=10.0, prompt_tokens=7, max_tokens=16)
    metrics.tokens(0, timing, 10.1)
    timing.admitted = 10.25
    metrics.tokens(1, timing, 10.5)
    metrics.tokens(2, timing, 10.75)
    metrics.finished("stop", timing, 11.0)

    assert value(metrics, "vllm:prompt_tokens_total") == 7
    assert value(metrics, "vllm:generation_tokens_total") == 3
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    sums = {
        "time_to_first_token_seconds": 0.5,
        "inter_token_latency_seconds": 0.25,
        "e2e_request_latency_seconds": 1.0,
        "request_queue_time_seconds": 0.25,
        "request_prefill_time_seconds": 0.25,
        "request_decode_time_seconds": 0.25,
        "request_inference_time_seconds": 0.5,
        "request_time_per_output_token_seconds": 0.125,
        "request_prompt_tokens": 7,
        "request_generation_tokens": 3,
        "request_params_max_tokens": 16,
    }
    assert {name: value(metrics, f"vllm:{name}_sum") for name in sums} == sums


def test_a_request_that_is_never_admitted_waited_until_it_ended() -> None:
    metrics, timing = Metrics("m"), Timing(arrived=10.0, prompt_tokens=7, max_tokens=16)
    metrics.finished("abort", timing, 12.0)
    assert value(metrics, "vllm:request_queue_time_seconds_sum") == 2.0
    assert value(metrics, "vllm:request_prefill_time_seconds_count") == 0
    assert value(metrics, "vllm:prompt_tokens_total") == 0


def test_loads_become_gauges_and_their_totals_survive_a_new_rank() -> None:
    metrics = Metrics("m")
    for queried, hit, steps in ((10, 4, 1), (15, 5, 2), (3, 1, 1), (6, 2, 2), (6, 2, 2)):
        if (queried, steps) == (3, 1):
            metrics.replaced()
        metrics.loads(
            Loads(
                running=2,
                waiting=1,
                used_blocks=5,
                total_blocks=20,
                prefix_queried_tokens=queried,
                prefix_hit_tokens=hit,
                preemptions=steps,
                steps=steps,
                step_tokens=10 * steps,
            )
        )
    assert value(metrics, "vllm:num_requests_running") == 2
    assert value(metrics, "vllm:num_requests_waiting") == 1
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    assert value(metrics, "vllm:prefix_cache_queries_total") == 21
    assert value(metrics, "vllm:prefix_cache_hits_total") == 7
    assert value(metrics, "vllm:num_preemptions_total") == 4
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 40
    assert value(metrics, "vllm:iteration_tokens_total_count") == 4


def test_reloads_are_counted_by_result_and_timed_by_phase() -> None:
    metrics = Metrics("m")
    reply = {"success": True, "generation": 3, "jit": {"compiled": 2}}
    metrics.reloaded({**reply, "seconds": {"drain": 0.5, "total": 1.5, "held": 1.0}})
    metrics.reloaded({"success": False, "code": "timeout"})
    assert value(metrics, "tokenspeed:reloads_total", result="success") == 1
    assert value(metrics, "tokenspeed:reloads_total", result="timeout") == 1
    assert value(metrics, "tokenspeed:reload_phase_seconds_sum", phase="total") == 1.5
    assert value(metrics, "tokenspeed:generation") == 3
    assert value(metrics, "tokenspeed:reload_jit_compiled_total") == 2


def test_what_the_start_found_is_told_in_labels() -> None:
    metrics, info = Metrics("m"), engine_info()
    metrics.started(info)
    sizes = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks)}
    assert value(metrics, "vllm:cache_config_info", **sizes) == 1


def test_the_exposition_is_prometheus_text() -> None:
    content, content_type = Metrics("m").exposition()
    assert content_type.startswith("text/plain")
    assert "vllm:num_requests_running" in {f.name for f in text_string_to_metric_families(content.decode())}
