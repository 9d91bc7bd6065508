"""A program that reloads itself: run it, edit `Clock.tick` in this file, and save.

    python examples/self_reload.py

The clock keeps its count, since the object lives on; an edit that does not work is undone, and the old code ticks on.
"""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path

from tokenspeed_reload import Reloader, ReloadError

NAME = Path(__file__).stem


class Clock:
    """Counts its ticks."""

    def __init__(self) -> None:
        self.ticks = 0

    def tick(self) -> str:
        """The next line to print."""
        self.ticks += 1
        return f"tick {self.ticks}"


def reload(reloader: Reloader) -> str | None:
    """Run what was edited; tells what was done, if anything."""
    try:
        report = reloader.reload_and_commit()
    except ReloadError as error:
        return f"undone: {error}"
    if not report.modules:
        return None
    return f"reloaded, {report.objects_patched} object(s) patched; stale: {[s.definition for s in report.stale]}"


def main() -> None:
    """Tick until Ctrl-C. This loop runs as `__main__`; what it calls is the module of this file, which reloads."""
    parser = argparse.ArgumentParser(description="A clock that runs the edits of its own file.")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="time between ticks")
    every = parser.parse_args().every
    reloader = Reloader(packages=[NAME])
    reloader.install()
    program = importlib.import_module(NAME)
    clock = program.Clock()
    told = None
    while True:
        news = program.reload(reloader)
        if news != told and news is not None:
            print(news, flush=True)
        told = news
        print(clock.tick(), flush=True)
        time.sleep(every)


if __name__ == "__main__":
    main()
