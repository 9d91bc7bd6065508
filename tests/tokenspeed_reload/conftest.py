"""A small program on disk that the tests edit, and a deep picture of a process to compare."""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.tokenspeed_reload.picture import deep_picture
from tokenspeed_reload import Reloader, Report
from tokenspeed_reload.undo import UndoLog


class Project:
    """Modules in a directory of `sys.path`, and the reloader that watches them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reloader = Reloader(packages=[])
        self.names: list[str] = []

    def write(self, **sources: str) -> None:
        """Write modules; a double underscore in a name stands for a dot, and `pkg__` for a package."""
        for name, text in sources.items():
            self.write_module(name.replace("__", ".").replace(".init", ".__init__"), text)

    def write_module(self, name: str, text: str) -> Path:
        """Write one module by its dotted name; `pkg.__init__` is a package's own file."""
        path = self.root.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        importlib.invalidate_caches()
        return path

    def watch(self, *packages: str, **options: Any) -> Reloader:
        """Start watching."""
        self.reloader = Reloader(packages=packages, **options)
        self.names = [*packages, *options.get("watch", ())]
        self.reloader.install()
        return self.reloader

    def load(self, name: str) -> ModuleType:
        """Import one of the modules."""
        return importlib.import_module(name)

    def reload(self, *modules: str) -> Report:
        """Reload and commit."""
        return self.reloader.reload_and_commit(modules or None)

    def close(self) -> None:
        """Forget the modules."""
        self.reloader.uninstall()
        for name in list(sys.modules):
            if any(name == n or name.startswith(n + ".") for n in self.names):
                del sys.modules[name]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    project = Project(tmp_path)
    yield project
    project.close()


@pytest.fixture
def picture() -> Callable[[dict[str, Any], list[str]], list[Any]]:
    return deep_picture


_STAMPS = itertools.count(1)


@pytest.fixture
def keep_stamp() -> Callable[[Path, str], None]:
    """Edit a file so that its size and time stay what they were."""

    def edit(path: Path, text: str) -> None:
        before = path.stat()
        path.write_text(text, encoding="utf-8")
        assert path.stat().st_size == before.st_size
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    return edit


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Objects of an earlier test must not be taken for holders in this one."""
    gc.collect()
    yield


@pytest.fixture
def broken_writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Iterator[int]]:
    """Let a reload fail at some of its writes, once each: the first, the last, and one between them."""
    add, once = UndoLog.add, UndoLog.once
    state = {"left": 0, "seen": 0}

    def count() -> None:
        state["seen"] += 1
        state["left"] -= 1
        if state["left"] == 0:
            raise RuntimeError("a write fails")

    def broken_add(self: UndoLog, record: Any) -> None:
        add(self, record)
        count()

    def broken_once(self: UndoLog, kind: Any, target: Any) -> None:
        once(self, kind, target)
        count()

    def points() -> Iterator[int]:
        monkeypatch.setattr(UndoLog, "add", broken_add)
        monkeypatch.setattr(UndoLog, "once", broken_once)
        state.update(left=-1, seen=0)
        yield 0  # to count the writes
        total = state["seen"]
        for at in sorted({1, total // 3, 2 * total // 3, total} - {0}):
            state.update(left=at)
            yield at
        monkeypatch.setattr(UndoLog, "add", add)
        monkeypatch.setattr(UndoLog, "once", once)

    return points
