"""The example runs the edits of its own file, and goes on after one that does not work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tokenspeed_reload

EXAMPLE = Path(__file__).parents[2] / "examples" / "self_reload.py"


@pytest.fixture
def program(tmp_path: Path) -> Iterator[tuple[Path, Iterator[str]]]:
    path = tmp_path / EXAMPLE.name
    shutil.copy(EXAMPLE, path)
    environment = {**os.environ, "PYTHONPATH": str(Path(tokenspeed_reload.__file__).parents[1])}
    command = [sys.executable, str(path), "--every", "0.02"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield path, iter(process.stdout)
        process.kill()


def edit(path: Path, text: str) -> None:
    """Write a file at once: the program may look at any moment."""
    scratch = path.with_suffix(".new")
    scratch.write_text(text)
    scratch.replace(path)


def test_the_example_reloads_itself(program):
    path, lines = program
    assert next(lines) == "tick 1\n"
    text = path.read_text()
    edit(path, text.replace('return f"tick', 'return f"tock'))
    news = next(line for line in lines if not line.startswith("tick"))
    assert news.startswith("reloaded, ") and news.endswith("stale: []\n")
    count = int(next(lines).removeprefix("tock "))
    assert count > 1
    edit(path, text.replace('return f"tick', 'return g"tick'))
    assert next(line for line in lines if not line.startswith("tock")).startswith("undone: ")
    assert int(next(lines).removeprefix("tock ")) > count
    edit(path, text)
    assert next(line for line in lines if not line.startswith(("tock", "undone"))).startswith(("reloaded, ", "tick"))
