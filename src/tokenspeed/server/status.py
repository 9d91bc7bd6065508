"""The JSON lines through which the front reports to the process that started it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any


class StatusPipe:
    """The write end of the parent's pipe; with `fd` None there is nobody to report to."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def send(self, event: str, **fields: Any) -> bool:
        """Write one event; whether somebody can read it. A parent that is gone is noticed by `watch`."""
        if self._fd is None:
            return False
        line = json.dumps({"event": event, **fields}) + "\n"
        try:
            os.write(self._fd, line.encode())
        except BrokenPipeError:
            return False
        return True

    def watch(self, on_parent_gone: Callable[[], None]) -> None:
        """Call `on_parent_gone` once when the read end closes: the parent has died."""
        if self._fd is None:
            return
        fd, loop = self._fd, asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(fd)
            on_parent_gone()

        try:
            # A pipe's write end becomes "readable" only when its last reader is closed.
            loop.add_reader(fd, gone)
        except PermissionError:
            # A regular file cannot be watched, and outlives any parent.
            return
