"""Signs of life: a thread of each rank tells the front how far the main thread has come, and where it stands."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

import msgspec
import zmq

from tokenspeed.runtime.protocol.state import SIGN_INTERVAL_S, Sign
from tokenspeed_kernel.progress import PROGRESS

OWN_PACKAGES = ("tokenspeed.runtime.", "tokenspeed_kernel.")
"""Whose code the place that is told lies in, where it is on the way to where the main thread stands."""


class Signs:
    """Tells, from `start` on and for as long as the process lives. A main thread that loops does not stop it.

    Until the first mark is passed each imported module is one: to import torch takes minutes from some disks.
    """

    def __init__(self, rank: int, run_dir: Path):
        self.rank = rank
        self.run_dir = run_dir
        self._main = threading.main_thread()
        self._imported = 0

    def start(self) -> None:
        """Begin to tell about the main thread."""
        threading.Thread(target=self._run, name="signs", daemon=True).start()

    def sign(self) -> Sign:
        """What is to be told now."""
        frame = sys._current_frames().get(self._main.ident or 0)
        place = None if frame is None else _own(frame)
        if not PROGRESS.count:
            self._imported = max(self._imported, len(sys.modules))
        return Sign(
            rank=self.rank,
            count=self._imported + PROGRESS.count,
            what=_plain(PROGRESS.what),
            waiting_for=PROGRESS.waiting_for,
            file="" if place is None else _plain(place.f_code.co_filename),
            line=0 if place is None else _line_of(place),
            function="" if place is None else place.f_code.co_name,
        )

    def _run(self) -> None:
        # A context of its own: the main thread ends the other one when it likes.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.linger = 0
        socket.set_hwm(2)  # old news are no news
        socket.connect(f"ipc://{self.run_dir}/signs")
        encoder = msgspec.msgpack.Encoder()
        pause = threading.Event()
        while not pause.wait(SIGN_INTERVAL_S):
            try:
                socket.send(encoder.encode(self.sign()), zmq.NOBLOCK)
            except zmq.Again:
                continue


def _plain(text: str) -> str:
    """A text that a message can hold: edited code may import a module, or stand in a file, of any name."""
    return text.encode(errors="replace").decode()


def _line_of(frame: FrameType) -> int:
    """The line in which a frame stands; its first one where it is in code of no line, as behind a `with`."""
    return frame.f_lineno or frame.f_code.co_firstlineno


def _own(frame: FrameType) -> FrameType:
    """The innermost frame of our own packages, else the innermost of all."""
    found: FrameType | None = frame
    while found is not None:
        if str(found.f_globals.get("__name__")).startswith(OWN_PACKAGES):
            return found
        found = found.f_back
    return frame
