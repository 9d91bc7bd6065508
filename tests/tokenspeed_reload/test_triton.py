"""Kernels of Triton and Gluon, compiled and interpreted, each in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tokenspeed_reload

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

HERE = Path(__file__).parent
SOURCES = Path(tokenspeed_reload.__file__).parents[1]


@pytest.mark.parametrize(("file", "interpret"), [("compiled.py", "0"), ("interpreted.py", "1")])
def test_edits_of_kernels(file, interpret, tmp_path):
    command = [sys.executable, "-m", "pytest", "-c", str(HERE / "kernels.ini"), str(HERE / "triton" / file)]
    command += ["--rootdir", str(HERE.parents[1]), "--confcutdir", str(HERE), "--basetemp", str(tmp_path / "t")]
    environment = {**os.environ, "TRITON_INTERPRET": interpret, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
