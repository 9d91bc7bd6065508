"""What is left of a rank that ended in the middle of something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE
from tokenspeed.runtime.protocol.blackbox import LARGEST, BlackBox, Work, read_work


@pytest.fixture
def blackbox(tmp_path: Path) -> BlackBox:
    blackbox = BlackBox(0, tmp_path)
    blackbox.open()
    return blackbox


def test_it_outlives_the_process_however_that_ends(tmp_path: Path) -> None:
    code = f"""
import os, pathlib
from tokenspeed.runtime.protocol.blackbox import BlackBox
blackbox = BlackBox(1, pathlib.Path({str(tmp_path)!r}))
blackbox.open()
blackbox.runs(["7", "8"])
with blackbox.taking("9"):
    os._exit(3)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE).returncode == 3
    assert read_work(tmp_path, 2) == Work(ran=frozenset({"7", "8"}), taken=frozenset({"9"}))


def test_what_was_taken_in_waits(tmp_path: Path, blackbox: BlackBox) -> None:
    with blackbox.taking("1"):
        assert read_work(tmp_path, 1).taken == {"1"}
    assert read_work(tmp_path, 1) == Work()


def test_what_fails_while_it_is_taken_in_is_known(tmp_path: Path, blackbox: BlackBox) -> None:
    with pytest.raises(ValueError), blackbox.taking("1"):
        raise ValueError
    assert read_work(tmp_path, 1).taken == {"1"}


@pytest.mark.parametrize("call_id", ["a", "two words", "lines\nruns 5\n", '"', "reading"])
def test_the_last_state_of_a_reload_is_that_of_rank_0(tmp_path: Path, blackbox: BlackBox, call_id: str) -> None:
    other = BlackBox(1, tmp_path)
    other.open()
    other.reloads(call_id, "reading")
    assert read_work(tmp_path, 2) == Work(reload=(call_id, "reading"))
    blackbox.reloads("before", "committing")
    blackbox.reloads(call_id, "patching")
    assert read_work(tmp_path, 2) == Work(reload=(call_id, "patching"))


def test_it_stays_small(tmp_path: Path, blackbox: BlackBox) -> None:
    while not blackbox.full:
        blackbox.runs(map(str, range(1000)))
    blackbox.open()
    blackbox.runs(["5"])
    assert not blackbox.full
    assert blackbox.path.stat().st_size < LARGEST
    assert read_work(tmp_path, 1).ran == {"5"}


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path, blackbox: BlackBox) -> None:
    blackbox.runs(["5"])
    with blackbox.path.open("a") as file:
        file.write("runs 6")
    assert read_work(tmp_path, 1).ran == {"5"}


def test_one_that_is_not_open_notes_nothing(tmp_path: Path) -> None:
    blackbox = BlackBox(0, tmp_path)
    blackbox.runs(["5"])
    with blackbox.taking("6"):
        pass
    blackbox.close()
    assert list(tmp_path.iterdir()) == []
    assert read_work(tmp_path, 3) == Work()
