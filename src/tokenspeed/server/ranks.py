"""The rank processes of one set: the front starts them, notices at once when one ends, and leaves none behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from tokenspeed.errors import ResourceError
from tokenspeed.server.errors import EngineLost
from tokenspeed.server.kept import KeptMemory

RANK_COMMAND = (sys.executable, "-m", "tokenspeed.rank")

KILL_TIMEOUT = 60.0
"""Seconds that the kernel gets to end a process."""

FAILED_MESSAGE_GRACE = 0.5
"""Seconds that a rank's own last message gets to arrive after its exit."""


class Ranks:
    """`size` processes. `on_lost` is called once for each that ends before `expect_exit`.

    They leave in `kept` what is to outlive them; None where nothing is.
    """

    def __init__(
        self,
        run_dir: Path,
        size: int,
        on_lost: Callable[[EngineLost], None],
        command: Sequence[str] = RANK_COMMAND,
        kept: KeptMemory | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._size = size
        self._on_lost = on_lost
        self._command = command
        self._kept = kept
        self._processes: list[asyncio.subprocess.Process] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._exit_expected = False

    async def start(self) -> None:
        """Start every rank in a process group of its own, so that Ctrl-C reaches only the one who drains.

        A rank is tied to this process: the kernel kills it when the front dies.

        Raises:
            ResourceError: when the machine has no room for another process.
        """
        for rank in range(self._size):
            try:
                process = await self._spawn(rank)
            except OSError as error:
                reason = error.strerror or error
                raise ResourceError(
                    f"no process for rank {rank} can be started ({reason}); stop what else runs"
                ) from error
            self._processes.append(process)
            self._watchers.append(asyncio.create_task(self._watch(rank, process)))

    async def _spawn(self, rank: int) -> asyncio.subprocess.Process:
        lifeline = (sys.executable, "-m", "tokenspeed.lifeline", str(os.getpid()))
        command = [*lifeline, *self._command]
        with ExitStack() as stack:
            inherited: tuple[int, ...] = ()
            if self._kept is not None:
                inherited = (stack.enter_context(self._kept.connect(rank)).fileno(),)
                command += ["--keeper-fd", str(inherited[0])]
            command += ["--run-dir", str(self._run_dir), "--rank", str(rank)]
            return await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, process_group=0, pass_fds=inherited
            )

    def pid(self, rank: int) -> int | None:
        """The process of a rank; None before it was started."""
        return self._processes[rank].pid if rank < len(self._processes) else None

    def expect_exit(self) -> None:
        """From here on an exit is not a loss."""
        self._exit_expected = True

    async def join(self, timeout: float) -> None:
        """Wait for all to end by themselves, up to `timeout` seconds; then kill them.

        Raises:
            EngineLost: when one does not end even so, as a process in the middle of a driver's call may.
        """
        self.expect_exit()
        if not self._watchers:
            return
        await asyncio.wait(self._watchers, timeout=timeout)
        self._signal(signal.SIGKILL)
        _, alive = await asyncio.wait(self._watchers, timeout=KILL_TIMEOUT)
        if alive:
            rank = min(self._watchers.index(watcher) for watcher in alive)
            raise EngineLost(f"rank {rank} does not end though it was killed; restart the machine", rank=rank)

    async def kill(self) -> None:
        """End all at once."""
        await self.join(0)

    async def _watch(self, rank: int, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self._exit_expected:
            return
        if code >= 0:
            # A rank that ends by itself has mostly said why; that message is the better one.
            await asyncio.sleep(FAILED_MESSAGE_GRACE)
        if not self._exit_expected:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self._on_lost(EngineLost(f"rank {rank} ended with {how}; see its messages above", rank=rank))

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                continue
