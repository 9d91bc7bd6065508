"""The run directory, and what is left of those of killed servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tokenspeed.errors import ResourceError
from tokenspeed.gateway.rundir import private_directory

HOLD = "from tokenspeed.gateway.rundir import *\nwith private_directory() as d: print(d, flush=True); input()"


def hold(base: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a run directory in `base`."""
    environment = {**os.environ, "TMPDIR": str(base)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str], signum: int) -> None:
    process.send_signal(signum)
    process.communicate()


def test_what_a_killed_server_left_is_removed_at_the_next_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, left = hold(tmp_path)
    alive, used = hold(tmp_path)
    (left / "config.json").write_text("{}")
    end(killed, signal.SIGKILL)
    assert left.is_dir()
    with private_directory() as run_dir:
        assert sorted(tmp_path.iterdir()) == sorted([used, run_dir])
    end(alive, signal.SIGKILL)


def test_directories_of_others_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (tmp_path / "tokenspeed-link").symlink_to(elsewhere)
    (tmp_path / "tokenspeed-file").touch()
    (tmp_path / "tokenspeed-without-lock").mkdir()
    before = sorted(tmp_path.iterdir())
    with private_directory():
        pass
    assert sorted(tmp_path.iterdir()) == before
    assert (elsewhere / "lock").exists()


def test_a_long_temporary_directory_is_avoided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("é" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with private_directory() as run_dir:
        assert run_dir.parent == Path("/tmp")
        assert run_dir.stat().st_mode & 0o077 == 0


def test_no_temporary_directory_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/directory")
    with pytest.raises(ResourceError, match="set TMPDIR"), private_directory():
        pass
