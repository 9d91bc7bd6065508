"""Many reloads, good and bad ones, leave nothing behind on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.program import run

MIB = 1 << 20
GROWTH = 8 * MIB
"""Bytes that the reloads behind the twentieth may take together."""
ROUNDS = {"cuda": 20, "cpu": 2}


def test_reloads_leave_no_residue(
    device: str, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    scratch = tmp_path_factory.mktemp("residue")
    told = run("residue", tiny(dtype="float32"), scratch, device, ROUNDS[device])
    # Each kind of edit ends in one way, every time.
    assert list(told["outcomes"].values()) == [ROUNDS[device]] * 5, told["outcomes"]
    free = told["free"]
    assert free[min(3, len(free) - 1)] - free[-1] <= GROWTH, [value // MIB for value in free]
