"""`ts bench serve` on a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Server
from tokenspeed.cli.main import main

VLLM_KEYS = {
    "date",
    "backend",
    "model_id",
    "num_prompts",
    "request_rate",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    *(f"{part}_{m}_ms" for part in ("mean", "median", "std", "p99") for m in ("ttft", "tpot", "itl", "e2el")),
}
"""What scripts around `vllm bench serve` read."""

DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"}


def bench(server: Server, directory: Path, *flags: str) -> dict[str, Any]:
    """The saved result of a benchmark with a dozen short requests."""
    lengths = ["--random-input-len", "24", "--random-output-len", "6", "--num-prompts", "12", "--ignore-eos"]
    save = ["--save-result", "--result-dir", str(directory), "--result-filename", "result.json", "--disable-tqdm"]
    assert main(["bench", "serve", "--base-url", server.url, *lengths, *save, *flags]) == 0
    result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return result


def test_a_benchmark_counts_what_the_server_did(
    smollm2: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = smollm2.metric("vllm:generation_tokens_total")
    told = bench(smollm2, tmp_path, "--max-concurrency", "4", "--num-warmups", "3", "--goodput", "e2el:600000")
    assert told.keys() >= VLLM_KEYS and not told.keys() & DETAILS
    assert (told["completed"], told["failed"]) == (12, 0)
    assert (told["total_input_tokens"], told["total_output_tokens"]) == (12 * 24, 12 * 6)
    assert told["request_goodput"] == told["request_throughput"] == pytest.approx(12 / told["duration"])
    assert told["max_concurrent_requests"] == 4
    assert told["request_rate"] == "inf" and told["backend"] == "openai"
    # One token of the first request that shows that the server answers.
    assert smollm2.metric("vllm:generation_tokens_total") - before == (12 + 3) * 6 + 1
    assert "Successful requests:                            12" in capsys.readouterr().out


def test_chats_at_a_rate_with_details(smollm2: Server, tmp_path: Path) -> None:
    flags = ["--backend", "openai-chat", "--request-rate", "8", "--save-detailed", "--metadata", "commit=abc"]
    told = bench(smollm2, tmp_path, *flags, "--metric-percentiles", "50,99", "--percentile-metrics", "ttft,itl")
    assert told.keys() >= DETAILS and told["commit"] == "abc"
    assert told["output_lens"] == [6] * 12 and len(told["itls"]) == 12
    assert told["duration"] > 12 / 8
    assert told["p50_ttft_ms"] == told["median_ttft_ms"] and "p99_tpot_ms" not in told


def test_repeated_prefixes_are_found_in_the_cache(smollm2: Server, tmp_path: Path) -> None:
    before = smollm2.metric("vllm:prefix_cache_hits_total")
    sizes = {"num-prefixes": 2, "prefix-len": 64, "suffix-len": 8, "output-len": 2}
    flags = [word for name, size in sizes.items() for word in (f"--prefix-repetition-{name}", str(size))]
    bench(smollm2, tmp_path, "--dataset-name", "prefix_repetition", *flags, "--max-concurrency", "1")
    # Of 12 prompts, 10 find the full blocks of a prefix; text may merge two tokens where the suffix begins.
    assert smollm2.metric("vllm:prefix_cache_hits_total") - before >= 10 * 48


def test_a_profile_is_taken_meanwhile(smollm2: Server, tmp_path: Path) -> None:
    profile = ["--profile", "--profile-activities", "CPU", "--profile-num-steps", "3"]
    bench(smollm2, tmp_path, *profile, "--profile-output-dir", str(tmp_path / "steps"))
    assert list((tmp_path / "steps").glob("*.json.gz"))
    bench(
        smollm2, tmp_path, "--profile", "--profile-activities", "CPU", "--profile-output-dir", str(tmp_path / "whole")
    )
    assert list((tmp_path / "whole").glob("*.json.gz"))


def test_requests_that_fail_are_told(smollm2: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = ["--num-prompts", "2", "--random-input-len", "1100", "--disable-tqdm"]
    assert main(["bench", "serve", "--base-url", smollm2.url, *long]) == 1
    printed = capsys.readouterr().out
    assert "Failed requests:                                 2" in printed
    assert "failed: 400" in printed
    assert main(["bench", "serve", "--base-url", smollm2.url, "--model", "another", "--tokenizer", "smollm2"]) == 4
    assert "does not answer a first request: 4" in capsys.readouterr().err
