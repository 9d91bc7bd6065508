"""An engine as `LLM` sees it, and the one that runs in the caller's own process."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol

from tokenspeed.runtime.config import Config
from tokenspeed.runtime.distributed.channel import Channel
from tokenspeed.runtime.engine.directives import Directive, StreamMessage
from tokenspeed.runtime.engine.loop import EngineLoop
from tokenspeed.runtime.engine.outbox import Outbox
from tokenspeed.runtime.engine.process import build
from tokenspeed.runtime.engine.startup import Startup
from tokenspeed.runtime.protocol.calls import ToEngine
from tokenspeed.runtime.protocol.message import Message
from tokenspeed.runtime.protocol.reports import Ready
from tokenspeed.runtime.protocol.state import EngineInfo
from tokenspeed_reload import Reloader

SHORT_WAIT_S = 0.05
"""Longest sleep in one round, while only a clock can change something."""


class Engine(Protocol):
    """Takes messages of the front and gives back those of rank 0."""

    def start(self) -> EngineInfo:
        """Load the model.

        Raises:
            TokenSpeedError: with one sentence for the user.
        """
        ...

    def send(self, message: ToEngine) -> None:
        """Pass a message on."""
        ...

    def receive(self) -> Sequence[Message]:
        """Wait for messages; maybe none, after a while. Called only while something is open.

        Raises:
            EngineLost: when a rank cannot go on.
        """
        ...

    def close(self) -> None:
        """Free what `start` took."""
        ...


class LocalEngine:
    """One rank in this process. It computes within `receive`, one step a call, and holds no thread."""

    def __init__(self, config: Config, run_dir: Path, reloader: Reloader | None) -> None:
        self._config = config
        self._run_dir = run_dir
        self._reloader = reloader

    def start(self) -> EngineInfo:
        """See `Engine`."""
        self._outbox = LocalOutbox(0, self._run_dir)
        self._stream = LocalStream()
        startup = Startup(self._config, Channel(0, 1, self._run_dir), self._outbox)
        self._loop: EngineLoop | None = build(startup, self._stream, self._reloader)
        return next(message.info for message in self._outbox.take() if isinstance(message, Ready))

    def send(self, message: ToEngine) -> None:
        """See `Engine`."""
        self._stream.messages.append(message)

    def receive(self) -> Sequence[Message]:
        """See `Engine`. Ctrl-C waits for the end of the step; a second one does not."""
        assert self._loop is not None
        with interrupt_later():
            self._loop.turn()
        return self._outbox.take()

    def close(self) -> None:
        """See `Engine`."""
        self._loop = None
        # Start-up froze its objects for a process that lives as long as they do.
        gc.unfreeze()
        gc.collect()


class LocalStream:
    """The messages of `LocalEngine.send`."""

    def __init__(self) -> None:
        self.messages: list[StreamMessage] = []

    def receive(self, directives: Sequence[Directive], wait_s: float | None) -> list[StreamMessage]:
        """See `Stream.receive`; it never waits long, since nobody can send meanwhile."""
        received = [*self.messages, *directives]
        self.messages.clear()
        if not received and wait_s != 0:
            time.sleep(SHORT_WAIT_S if wait_s is None else min(wait_s, SHORT_WAIT_S))
        return received


class LocalOutbox(Outbox):
    """Keeps the messages for `LocalEngine.receive`."""

    def __init__(self, rank: int, run_dir: Path) -> None:
        super().__init__(rank, run_dir)
        self._messages: list[Message] = []

    def take(self) -> list[Message]:
        """What was said since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def _post(self, message: Message) -> None:
        self._messages.append(message)


@contextmanager
def interrupt_later() -> Iterator[None]:
    """Hold back a Ctrl-C until the block is done, since a step that is cut off loses its requests."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    caught: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(frame)
        if len(caught) > 1:
            usual(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if caught:
        usual(signal.SIGINT, caught[0])
