"""The first example of docs/reloader.md does what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import tokenspeed_reload

PAGE = Path(__file__).parents[2] / "docs" / "reloader.md"

WORK = """
from pathlib import Path
EDITS = ["return 'new'", "return 1 / 0\\nraise ValueError", "return 'newest'"]
count = [0]
def name(): return 'old'
def goes_on(): return count[0] < 4
def step():
    print(name())
    text = Path(__file__).read_text()
    if count[0] < len(EDITS):
        start = text.index("def name")
        end = text.index("def goes_on")
        Path(__file__).write_text(text[:start] + "def name(): " + EDITS[count[0]] + "\\n" + text[end:])
    count[0] += 1
"""


def test_the_first_example_runs_edits_and_goes_on_after_one_that_fails(tmp_path):
    example = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "program.py").write_text(example)
    environment = {**os.environ, "PYTHONPATH": str(Path(tokenspeed_reload.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")], env=environment, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == ["old", "new"] and lines[2].startswith("undone: work: ") and lines[3:] == ["new", "newest"]
