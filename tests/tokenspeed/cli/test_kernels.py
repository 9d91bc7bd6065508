"""`ts kernels`, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


def ts(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tokenspeed.cli.main", "kernels", *arguments], capture_output=True, text=True
    )


def told(*arguments: str) -> dict[str, Any]:
    done = ts(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_every_operation_has_a_solution_on_a_cpu_and_says_why() -> None:
    report = told("smollm2", "--device", "cpu")
    assert (report["device"], report["dtype"], report["head_dim"]) == ("cpu", "float32", 64)
    operations = report["operations"]
    assert all(entry["selected"] for entry in operations.values())
    assert operations["attention.decode"]["selected"] == "trimmed"
    reasons = {s["solution"]: s["passed_over"] for s in operations["attention.decode"]["solutions"]}
    assert reasons["reference"] == "has priority 0"


def test_a_gpu_can_be_asked_for_where_there_is_none() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    operations = told("--device", "cuda", "--kernel", "norm.rms_norm=reference")["operations"]
    assert operations["attention.decode"]["selected"] == "triton"
    assert operations["norm.rms_norm"]["selected"] == "reference"
    assert operations["norm.rms_norm"]["why"] == "--kernel norm.rms_norm=reference"


def test_the_list_for_people_marks_what_is_selected() -> None:
    done = ts("--device", "cpu")
    assert done.returncode == 0
    assert "  * trimmed      priority 4" in done.stdout
    assert "Nothing is tuned on this machine" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--kernel", "norm.rms_norm"), "--kernel takes OPERATION=SOLUTION"),
        (("--device", "cpu", "--kernel", "norm.rms_norm=fast"), "names no solution; give one of reference"),
        (("/nowhere/at/all",), "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    done = ts(*arguments)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
