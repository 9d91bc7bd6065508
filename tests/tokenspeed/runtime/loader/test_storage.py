from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from tokenspeed.errors import ModelError
from tokenspeed.runtime.loader.storage import cache_root, make_once


def test_root_is_the_chosen_directory_or_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path / "chosen"))
    assert cache_root() == tmp_path / "chosen"
    monkeypatch.delenv("TOKENSPEED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "tokenspeed"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "tokenspeed"


def write_text(scratch: Path) -> Path:
    path = scratch / "anything"
    path.write_text("content")
    return path


def test_what_exists_is_not_built_again(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    assert make_once(target, write_text).read_text() == "content"

    def refuse(scratch: Path) -> Path:
        raise AssertionError(f"built again in {scratch}")

    assert make_once(target, refuse) == target


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    def fail(scratch: Path) -> Path:
        (scratch / "half").write_text("half")
        raise ModelError("no network")

    target = tmp_path / "target"
    with pytest.raises(ModelError, match="no network"):
        make_once(target, fail)
    assert [path for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []
    assert make_once(target, write_text).exists()


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"cannot be written .* TOKENSPEED_CACHE"):
        make_once(tmp_path / "file" / "target", write_text)


def _build_slowly(target: Path, log: Path, started: object) -> None:
    def build(scratch: Path) -> Path:
        with log.open("a") as file:
            file.write("built\n")
        return write_text(scratch)

    started.wait()  # type: ignore[attr-defined]
    make_once(target, build)


def test_processes_that_come_at_once_build_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    started = context.Barrier(3)
    target, log = tmp_path / "target", tmp_path / "log"
    workers = [context.Process(target=_build_slowly, args=(target, log, started)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert log.read_text() == "built\n"
    assert target.read_text() == "content"


def _build_and_die(target: Path) -> None:
    def build(scratch: Path) -> Path:
        (scratch / "half").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
        return scratch

    make_once(target, build)


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    target = tmp_path / "target"
    worker = multiprocessing.get_context("spawn").Process(target=_build_and_die, args=(target,))
    worker.start()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    assert not target.exists()
    assert make_once(target, write_text).read_text() == "content"
    assert {path.name for path in tmp_path.iterdir()} == {"target", ".target.lock"}
