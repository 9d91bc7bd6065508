"""Functions of CuTe DSL, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tokenspeed_reload

pytest.importorskip("cutlass.cute")

HERE = Path(__file__).parent
SOURCES = Path(tokenspeed_reload.__file__).parents[1]


@pytest.mark.parametrize("file", ["compiled.py", "own.py"])
def test_edits_of_functions(file, tmp_path):
    command = [sys.executable, "-m", "pytest", "-c", str(HERE / "kernels.ini"), str(HERE / "cute" / file)]
    command += ["--rootdir", str(HERE.parents[1]), "--confcutdir", str(HERE), "--basetemp", str(tmp_path / "t")]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
