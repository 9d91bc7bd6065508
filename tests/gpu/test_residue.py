"""Many reloads, good and bad ones, leave nothing behind on the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

MIB = 1 << 20
GROWTH = 8 * MIB
"""Bytes that the reloads behind the twentieth may take together."""
ROUNDS = {"cuda": 20, "cpu": 2}


def test_reloads_leave_no_residue(
    device: str, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    program = Path(__file__).with_name("residue.py")
    scratch = tmp_path_factory.mktemp("residue")
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(program), str(tiny(dtype="float32")), str(scratch), device, str(ROUNDS[device])],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    # Each kind of edit ends in one way, every time.
    assert list(told["outcomes"].values()) == [ROUNDS[device]] * 5, told["outcomes"]
    free = told["free"]
    assert free[min(3, len(free) - 1)] - free[-1] <= GROWTH, [value // MIB for value in free]
