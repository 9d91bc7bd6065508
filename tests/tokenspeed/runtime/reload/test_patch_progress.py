"""A long patch gets on: each module, import and pass over the objects is a mark for the judge of lost ranks."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tokenspeed.runtime.engine.signs import Signs
from tokenspeed.runtime.reload.attempt import mark_patch
from tokenspeed.server.errors import EngineLost
from tokenspeed.server.judge import Judge
from tokenspeed_kernel.progress import PROGRESS
from tokenspeed_reload import Reloader

LIMIT = 10
BELOW = 8
"""Seconds that each module takes, of a clock that stands still otherwise."""
NAMES = ("first", "second", "slow", "slow.one", "slow.two", "slow.three")


class Watch:
    """The judge of one rank, which hears and looks each second while a module takes its time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.judge = Judge(1, lambda: LIMIT, lambda rank: None, lambda: self.now)
        self.signs = Signs(0, Path())
        self.lost: list[EngineLost] = []

    def take(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.judge.hear(self.signs.sign())
            self.lost += filter(None, [self.judge.look()])


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch, host = Watch(), types.ModuleType("watch_host")
    host.__dict__["take"] = watch.take
    monkeypatch.setitem(sys.modules, "watch_host", host)
    monkeypatch.setattr(PROGRESS, "waiting_for", None)
    PROGRESS.step("patching")
    yield watch
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("package", ["slow", "first"], ids=["of the packages", "of others"])
@pytest.mark.parametrize(("progress", "is_lost"), [(mark_patch, False), (None, True)], ids=["told", "not told"])
def test_modules_that_are_slow_in_sum_are_not_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    watch: Watch,
    package: str,
    progress: Callable[[str], None] | None,
    is_lost: bool,
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    slow = f"import watch_host\nwatch_host.take({BELOW})\nX = 2\n"
    (tmp_path / "slow").mkdir()
    for name in ("__init__", "one", "two", "three"):
        (tmp_path / "slow" / f"{name}.py").write_text(slow)
    (tmp_path / "first.py").write_text("X = 1\n")
    (tmp_path / "second.py").write_text("from first import X\nY = X\n")
    reloader = Reloader(packages=["first", "second", package])
    reloader.install()
    try:
        second = importlib.import_module("second")
        imports = "import slow.one, slow.two, slow.three\n"
        (tmp_path / "first.py").write_text(imports + slow if package == "slow" else slow + imports)
        (tmp_path / "second.py").write_text(f"from first import X\n{slow}Y = X\n")
        reloader.reload(progress=progress).commit()
    finally:
        reloader.uninstall()
    assert second.Y == 2
    assert watch.now > 5 * LIMIT / 2
    assert bool(watch.lost) is is_lost


def test_a_module_that_never_ends_is_lost_all_the_same(watch: Watch) -> None:
    mark_patch("the start of first")
    watch.take(2 * LIMIT)
    assert watch.lost and "after the start of first" in str(watch.lost[0])


def test_imports_without_end_are_no_progress(watch: Watch) -> None:
    for _ in range(300):  # of a module that is not there, say, which is tried again and again
        for _ in range(200):
            mark_patch("the import of nothing")
        watch.take(1)
    assert watch.lost
