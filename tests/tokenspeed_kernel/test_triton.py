"""Triton's and Gluon's solutions without a GPU: that they compile for Hopper, and numbers under the interpreter.

The interpreter runs no Gluon.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str) -> str:
    """Run Python in a process of its own, since Triton decides at import how its kernels run."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_numbers_under_the_interpreter() -> None:
    # The interpreter computes with numpy, which warns of what is no number.
    quiet = "-W", "ignore::RuntimeWarning"
    said = run("-m", "pytest", "-q", *quiet, "-k", "triton", "tests/tokenspeed_kernel/ops", TRITON_INTERPRET="1")
    assert "passed" in said


def test_every_solution_compiles_for_hopper(tmp_path: Path) -> None:
    said = run(
        "-m", "tests.tokenspeed_kernel.compile_for_gpu", TOKENSPEED_TRITON="1", TRITON_CACHE_DIR=str(tmp_path / "cache")
    )
    told = [line.split() for line in said.splitlines()]
    compiled = {name for name, *_ in told}
    assert compiled >= {"decode_kernel", "merge_kernel", "extend_kernel", "rope_and_write_kv_kernel", "accept_kernel"}
    assert ("silu_and_mul_kernel", "gluon") in {(name, file) for name, file, *_ in told}
