"""Programs beside the tests, each in a process of its own: a reloader has to see every module at its import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 570


def run(module: str, *arguments: object, **environment: str) -> dict[str, Any]:
    """What `python -m tests.gpu.MODULE` prints last, as JSON; an end with an error fails with what it said."""
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", f"tests.gpu.{module}", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told
