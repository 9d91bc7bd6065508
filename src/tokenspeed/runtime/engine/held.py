"""How long a reload held requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tokenspeed.runtime.protocol.calls import ControlCall
from tokenspeed.runtime.protocol.reports import RequestOutput


class HeldRequests:
    """Measures from when the first request was held to its next token.

    A reload that held somebody is answered only then, so that the reply can tell the figure (in seconds).
    """

    def __init__(self) -> None:
        self._first: tuple[str, float] | None = None
        self._waiting: tuple[ControlCall, dict[str, Any]] | None = None

    def begin(self, request_id: str) -> None:
        """A request arrived while admission was closed, or runs and is held from now on."""
        if self._first is None:
            self._first = (request_id, time.monotonic())

    def answer_after(self, call: ControlCall, body: dict[str, Any]) -> bool:
        """Keep the reply until the first held request has its next token; False where none is held."""
        if self._first is None:
            return False
        self._waiting = (call, body)
        return True

    def progressed(self, outputs: Sequence[RequestOutput]) -> tuple[ControlCall, dict[str, Any]] | None:
        """The kept reply with its figure, once the first held request is among `outputs`."""
        if self._first is None or not any(output.request_id == self._first[0] for output in outputs):
            return None
        return self._release()

    def give_up(self) -> tuple[ControlCall, dict[str, Any]] | None:
        """The kept reply with the time so far, if there is one: from now on something else holds the requests."""
        return self._release() if self._waiting is not None else None

    def _release(self) -> tuple[ControlCall, dict[str, Any]] | None:
        first, self._first = self._first, None
        waiting, self._waiting = self._waiting, None
        if waiting is not None and first is not None:
            waiting[1]["seconds"]["held"] = time.monotonic() - first[1]
        return waiting
