"""A child process in a session of its own, that never outlives this process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress


class Child:
    """One child process; `name` is what messages call it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        stdout: int,
        pass_fds: Iterable[int] = (),
        environment: dict[str, str] | None = None,
    ) -> Child:
        """Start `command`. It leads a session, so that Ctrl-C in the terminal reaches only this process.

        Must be called on the main thread: the kernel ties the child to the thread that started it.
        """
        lifeline = [sys.executable, "-m", "tokenspeed.lifeline", str(os.getpid())]
        process = await asyncio.create_subprocess_exec(
            *lifeline,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
            # The working directory is not searched for modules: it may well hold an overlay of our packages.
            env={**os.environ, "PYTHONSAFEPATH": "1", **(environment or {})},
        )
        return cls(name, process)

    @property
    def output(self) -> asyncio.StreamReader:
        """What it prints, when it was started with `stdout=PIPE`."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def pid(self) -> int:
        """Its process id, which is its group's too."""
        return self._process.pid

    async def ended(self) -> int:
        """Wait for its end; the exit code, negative for a signal."""
        return await self._process.wait()

    async def how_it_ended(self) -> str:
        """Wait for its end and tell it: `ended with exit code 1` or `was killed by SIGKILL`."""
        code = await self.ended()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    async def stop(self, patience: float) -> bool:
        """Ask it to end and wait `patience` seconds; whether it did. `kill` does the rest."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
        try:
            await asyncio.wait_for(self.ended(), patience)
        except TimeoutError:
            return False
        return True

    def send_kill(self) -> None:
        """Kill it and all that is left of its process group; `ended` tells when that is done."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def kill(self) -> None:
        """`send_kill`, and wait for the end."""
        self.send_kill()
        await self.ended()
