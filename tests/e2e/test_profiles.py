"""Profiles of a running server with two ranks, asked for through the gateway and at the control address."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import HTTP, Server
from tests.waiting import PATIENCE

SAMPLER = "tokenspeed.runtime.sampling.sampler"


@pytest.fixture
def server(pair: Server) -> Server:
    return pair


@pytest.fixture(autouse=True)
def nothing_left(server: Server) -> Iterator[None]:
    """A test that fails between a start and a stop must not spoil the next."""
    yield
    server.control("POST", "/stop_profile")


def start(server: Server, directory: Path, **body: Any) -> dict[str, Any]:
    reply = server.control("POST", "/start_profile", {"output_dir": str(directory), "profile_id": "p", **body})
    parsed: dict[str, Any] = reply.json()
    assert reply.status_code == (200 if parsed["success"] else 400)
    return parsed


def stop(server: Server) -> dict[str, Any]:
    reply = server.control("POST", "/stop_profile")
    parsed: dict[str, Any] = reply.json()
    assert reply.status_code == (200 if parsed["success"] else 400)
    return parsed


def steps(path: Path) -> list[str]:
    """The kinds of the engine's steps in a trace, in order."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    labels = [(event["ts"], event["name"]) for event in events if event.get("cat") == "user_annotation"]
    return [name.split(": ")[1].split(",")[0] for _, name in sorted(labels) if name.startswith("step ")]


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_every_rank_writes_a_trace_of_the_steps_between_start_and_stop(server: Server, tmp_path: Path) -> None:
    server.complete("some text before", max_tokens=3)
    assert start(server, tmp_path)["success"]
    server.complete("some text within", max_tokens=4)
    reply = stop(server)
    server.complete("some text after", max_tokens=3)
    assert reply["files"] == [str(tmp_path / f"p-TP{rank}.trace.json.gz") for rank in (0, 1)]
    for file in reply["files"]:
        assert steps(Path(file)) == ["prefill", "decode", "decode", "decode"]


def test_the_gateway_starts_and_stops_a_profile(server: Server, tmp_path: Path) -> None:
    body = {"output_dir": str(tmp_path), "activities": ["CPU"], "with_stack": True, "record_shapes": True}
    started = HTTP.post(f"{server.url}/start_profile", json=body, timeout=PATIENCE)
    assert started.status_code == 200, started.text
    server.complete("some text within", max_tokens=2)
    stopped = HTTP.post(f"{server.url}/stop_profile", timeout=PATIENCE)
    assert stopped.status_code == 200, stopped.text
    files = sorted(tmp_path.iterdir())
    assert [path.name.split("-TP")[1] for path in files] == ["0.trace.json.gz", "1.trace.json.gz"]
    events = json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"]
    assert any("executor.py" in event["name"] for event in events), "with_stack shows the engine's own functions"
    assert any("Input Dims" in event.get("args", {}) for event in events)


def test_the_gateway_passes_a_refusal_on(server: Server) -> None:
    stopped = HTTP.post(f"{server.url}/stop_profile", timeout=PATIENCE)
    assert stopped.status_code != 200
    assert "no profile is running" in stopped.text
    started = HTTP.post(f"{server.url}/start_profile", json={"activities": ["GPU"]}, timeout=PATIENCE)
    assert started.status_code != 200
    assert "GPU needs a CUDA device" in started.text


def test_num_steps_end_a_profile(server: Server, tmp_path: Path) -> None:
    assert start(server, tmp_path, num_steps=3)["success"]
    server.complete("some text", max_tokens=10)
    assert names(tmp_path) == {"p-TP0.trace.json.gz", "p-TP1.trace.json.gz"}
    assert steps(tmp_path / "p-TP1.trace.json.gz") == ["prefill", "decode", "decode"]
    assert "ended by itself" in stop(server)["message"]


def test_a_profile_starts_at_the_step_that_start_step_names(server: Server, tmp_path: Path) -> None:
    now = start(server, tmp_path)["step"]
    stop(server)
    assert start(server, tmp_path, profile_id="later", start_step=now + 3, num_steps=2)["success"]
    server.complete("some text", max_tokens=8)
    assert steps(tmp_path / "later-TP0.trace.json.gz") == ["decode", "decode"]


def test_stages_are_recorded_apart(server: Server, tmp_path: Path) -> None:
    assert start(server, tmp_path, profile_by_stage=True, num_steps=2)["success"]
    server.complete("some text", max_tokens=6)
    stages = {f"p-TP{rank}-{stage}.trace.json.gz" for rank in (0, 1) for stage in ("prefill", "decode")}
    assert names(tmp_path) == stages
    assert steps(tmp_path / "p-TP0-prefill.trace.json.gz") == ["prefill"]
    assert steps(tmp_path / "p-TP0-decode.trace.json.gz") == ["decode", "decode"]


def test_a_profile_goes_on_over_a_reload(server: Server, tmp_path: Path) -> None:
    assert start(server, tmp_path)["success"]
    server.complete("some text", max_tokens=2)
    server.replace(SAMPLER, "logits.argmax(dim=-1)", "logits.argmin(dim=-1)")
    assert server.reload()["success"]
    server.complete("some text", max_tokens=2)
    assert stop(server)["success"]
    assert steps(tmp_path / "p-TP0.trace.json.gz") == ["prefill", "decode", "prefill", "decode"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"activities": ["GPU"]}, "GPU needs a CUDA device"),
        ({"activities": ["CPU", "MEM", "CUDA_PROFILER"]}, "MEM, CUDA_PROFILER needs a CUDA device"),
        ({"activities": ["FOO"]}, "FOO"),
        ({"num_steps": 0}, "num_steps"),
        ({"start_step": -1}, "start_step"),
        ({"profile_by_stage": True}, "num_steps"),
        ({"profile_id": "../p"}, "profile_id"),
        ({"profile_id": "a" * 300}, "profile_id"),
        ({"output_dir": "/proc/no/such"}, "/proc/no/such"),
        ({"output_dir": "a\0b"}, "output_dir"),
        ({"steps": 3}, "steps"),
    ],
)
def test_what_cannot_be_profiled_is_refused_and_changes_nothing(
    server: Server, tmp_path: Path, body: dict[str, Any], reason: str
) -> None:
    reply = start(server, tmp_path, **body)
    assert not reply["success"]
    assert reason in reply["message"]
    assert start(server, tmp_path)["success"]
    assert stop(server)["success"]


def test_a_second_start_is_refused_and_the_first_goes_on(server: Server, tmp_path: Path) -> None:
    assert start(server, tmp_path)["success"]
    second = start(server, tmp_path, profile_id="q")
    assert not second["success"]
    assert "profile p is running" in second["message"]
    assert stop(server)["success"]
    assert names(tmp_path) == {"p-TP0.trace.json.gz", "p-TP1.trace.json.gz"}


def test_a_stop_without_a_start_is_refused(server: Server) -> None:
    reply = stop(server)
    assert not reply["success"]
    assert reply["message"].startswith("no profile is running")


def test_a_directory_that_vanishes_costs_the_files_alone(server: Server, tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    assert start(server, directory)["success"]
    directory.rmdir()
    directory.write_text("a file now")
    reply = stop(server)
    assert not reply["success"]
    assert "failed on rank 0" in reply["message"]
    assert server.complete("some text", max_tokens=2)["choices"]
