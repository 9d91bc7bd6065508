"""What Ctrl-C, SIGTERM and SIGHUP ask of a running stack."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from tokenspeed.gateway.child import Child

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopAsked(Exception):
    """A signal asked for a stop; `signum` is its number."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Stopping:
    """The first signal asks for an orderly stop, the second kills the children at once."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._asked: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def watch(self) -> NoReturn:
        """Wait for the first signal, then raise.

        Raises:
            StopAsked: always.
        """
        raise StopAsked(await self._asked)

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle the signals inside the block."""
        loop = asyncio.get_running_loop()
        # nohup ignores SIGHUP on purpose.
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        handled = [signum for signum in STOP_SIGNALS if signum not in ignored]
        for signum in handled:
            loop.add_signal_handler(signum, self._on_signal, signum)
        try:
            yield
        finally:
            for signum in handled:
                loop.remove_signal_handler(signum)

    def _on_signal(self, signum: int) -> None:
        if not self._asked.done():
            self._asked.set_result(signum)
            return
        for child in self.children:
            child.send_kill()
