"""The command lines of the benchmarks: what they refuse before they measure, and how `bench` alone is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.cli.main import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_bench_alone_is_bench_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "bench", "--num-promts", "3") == (
        "ts bench serve: there is no flag --num-promts; did you mean --num-prompts?\n"
    )
    assert "did you mean bench latency?" in refused(capsys, "bench", "latencies")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--goodput", "ttf:3"], "--goodput has no ttf; did you mean ttft?"),
        (["--goodput", "itl:3"], "use ttft, tpot and e2el"),
        (["--goodput", "ttft"], "--goodput takes NAME:VALUE"),
        (["--goodput", "ttft:fast"], "'fast' is no number"),
        (["--metric-percentiles", "50,x"], "'x' is no number"),
        (["--percentile-metrics", "ttft,tpt"], "did you mean tpot?"),
        (["--profile-num-steps", "5"], "--profile-num-steps needs --profile"),
        (["--profile", "--profile-num-steps", "0"], "must be 1 or more"),
        (["--num-prompts", "0"], "--num-prompts must be 1 or more"),
        (["--max-concurrency", "0"], "--max-concurrency must be 1 or more"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--request-rate", "nan"], "--request-rate must be above 0"),
        (["--burstiness", "inf"], "--burstiness must be finite"),
        (["--metric-percentiles", "101"], "between 0 and 100"),
        (["--num-warmups", "-1"], "--num-warmups must be 0 or more"),
        (["--seed", "-1"], "--seed must be 0 or more"),
        (["--header", "Authorization"], "--header takes NAME=VALUE"),
    ],
)
def test_flags_that_cannot_work_are_refused(capsys: pytest.CaptureFixture[str], flags: list[str], reason: str) -> None:
    assert reason in refused(capsys, "bench", "serve", *flags)


def test_a_server_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--port", "9"]) == 4
    assert "check the address" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_the_engine_needs_one_model(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert "there is no model" in refused(capsys, "bench", command)
    assert "given twice" in refused(capsys, "bench", command, "a", "--model", "b")
    assert "there is no flag --port" in refused(capsys, "bench", command, "a", "--port", "1")


def test_latency_and_throughput_measure_the_engine(
    tokenizer_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--max-total-tokens", "2048", "--max-num-seqs", "8", "--disable-tqdm"]

    def measure(command: str, *flags: str) -> dict[str, Any]:
        output = tmp_path / f"{command}.json"
        assert main(["bench", command, str(tokenizer_dir), *small, *flags, "--output-json", str(output)]) == 0
        result: dict[str, Any] = json.loads(output.read_text())
        return result

    batch = ["--batch-size", "3", "--input-len", "20", "--output-len", "4"]
    told = measure("latency", *batch, "--num-iters", "2", "--num-iters-warmup", "1")
    assert len(told["latencies"]) == 2 and told["avg_latency"] > 0
    assert set(told["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert "Avg latency:" in capsys.readouterr().out

    told = measure("throughput", "--num-prompts", "5", "--input-len", "20", "--output-len", "4", "--seed", "-1")
    assert told["num_requests"] == 5 and told["total_num_tokens"] == 5 * 24
    assert told["tokens_per_second"] == pytest.approx(120 / told["elapsed_time"])

    chats = tmp_path / "chats.json"
    turns = [{"value": "Who was the first one on the moon?"}, {"value": "That was Neil Armstrong in 1969."}]
    chats.write_text(json.dumps([{"conversations": turns}]))
    told = measure("throughput", "--num-prompts", "3", "--dataset-name", "sharegpt", "--dataset-path", str(chats))
    assert told["num_requests"] == 3
