"""What Prometheus finds at the address of the ready line, compared with what was done to the server."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.harness import HTTP, Server
from tests.waiting import PATIENCE, until

ACTIVATION = "tokenspeed_kernel.ops.activation.reference"


class Scrape(dict[tuple[str, tuple[tuple[str, str], ...]], float]):
    """Values by name and labels; the label that all share is left out."""

    @classmethod
    def of(cls, url: str) -> Scrape:
        scrape = cls()
        for family in text_string_to_metric_families(HTTP.get(url, timeout=PATIENCE).text):
            for sample in family.samples:
                labels = {name: text for name, text in sample.labels.items() if name not in ("model_name", "le")}
                assert "model_name" in sample.labels, sample
                scrape[sample.name, tuple(sorted(labels.items()))] = sample.value
        return scrape

    def get_one(self, name: str, **labels: str) -> float:
        return self[name, tuple(sorted(labels.items()))]


@pytest.fixture
def server(alone: Server) -> Server:
    return alone


def scrape(server: Server) -> Scrape:
    (url,) = re.findall(r"metrics at (\S+)", server.output())
    return Scrape.of(url)


def test_every_request_and_reload_is_counted(server: Server) -> None:
    before = scrape(server)
    answers = [server.complete("a b c d e f g h" * 8, max_tokens=10, ignore_eos=True) for _ in range(3)]
    prompt = answers[0]["usage"]["prompt_tokens"]
    server.replace(ACTIVATION, "return silu(gate) * up", "return silu(gate) + up")
    assert server.reload()["success"]
    server.edit(ACTIVATION, lambda text: text + "\nraise RuntimeError('broken')\n")
    assert not server.reload()["success"]
    after = scrape(server)

    def grown(name: str, **labels: str) -> float:
        key = name, tuple(sorted(labels.items()))
        return after[key] - before.get(key, 0)

    assert grown("vllm:request_success_total", finished_reason="length") == 3
    assert grown("vllm:prompt_tokens_total") == grown("vllm:prefix_cache_queries_total") == 3 * prompt
    assert grown("vllm:request_prompt_tokens_sum") == 3 * prompt
    assert grown("vllm:generation_tokens_total") == grown("vllm:request_generation_tokens_sum") == 30
    assert grown("vllm:prefix_cache_hits_total") == 2 * ((prompt - 1) // 16 * 16)
    hits = grown("vllm:prefix_cache_hits_total")
    assert grown("vllm:iteration_tokens_total_sum") == 3 * prompt - hits + 27
    assert grown("vllm:inter_token_latency_seconds_count") == 27
    for part in ("queue_time", "prefill_time", "decode_time", "inference_time", "time_per_output_token"):
        assert grown(f"vllm:request_{part}_seconds_count") == 3
    parts = sum(grown(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode"))
    assert 0 < parts <= grown("vllm:e2e_request_latency_seconds_sum") + 1e-6
    assert grown("tokenspeed:reloads_total", result="success") == 1
    assert grown("tokenspeed:reloads_total", result="failed") == 1
    assert after.get_one("tokenspeed:generation") == server.reload_status()["generation"]
    assert grown("tokenspeed:generation") == 1
    for phase in ("drain", "read", "patch", "warm", "graphs", "total"):
        assert grown("tokenspeed:reload_phase_seconds_count", phase=phase) == 1
    assert after.get_one("tokenspeed:startup_seconds", phase="load") > 0
    assert after.get_one("vllm:cache_config_info", block_size="16", num_gpu_blocks="1024") == 1


def test_a_request_that_is_held_waits_in_the_queue(server: Server) -> None:
    before = scrape(server)
    server.control("POST", "/pause_generation")
    with ThreadPoolExecutor() as pool:
        held = pool.submit(server.complete, "Hello")
        until(lambda: server.metric("vllm:num_requests_waiting"))
        time.sleep(0.5)
        server.control("POST", "/continue_generation")
        held.result()
    after = scrape(server)
    waited = [found.get_one("vllm:request_queue_time_seconds_sum") for found in (before, after)]
    assert waited[1] - waited[0] >= 0.5
    assert after.get_one("vllm:num_requests_waiting") == 0
