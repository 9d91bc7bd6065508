"""How long a reload kept requests from starting."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tokenspeed.runtime.protocol import ControlCall, RequestOutput


class HeldRequests:
    """Measures from the arrival of the first held request to its first token.

    A reload that held somebody is answered only then, so that the reply can tell the figure.
    """

    def __init__(self) -> None:
        self._first: tuple[str, float] | None = None
        self._waiting: tuple[ControlCall, dict[str, Any]] | None = None

    def submitted(self, request_id: str) -> None:
        """A request arrived while admission was closed."""
        if self._first is None:
            self._first = (request_id, time.monotonic())

    def answer_after(self, call: ControlCall, body: dict[str, Any]) -> bool:
        """Keep the reply until the first held request has its first token; False where none is held."""
        if self._first is None:
            return False
        self._waiting = (call, body)
        return True

    def progressed(self, outputs: Sequence[RequestOutput]) -> tuple[ControlCall, dict[str, Any]] | None:
        """The kept reply with its figure, once the first held request is among `outputs`."""
        if self._first is None or not any(output.request_id == self._first[0] for output in outputs):
            return None
        held = time.monotonic() - self._first[1]
        return self._release(held)

    def give_up(self) -> tuple[ControlCall, dict[str, Any]] | None:
        """The kept reply without a figure: the held requests are held by something else now."""
        return self._release(None)

    def _release(self, held: float | None) -> tuple[ControlCall, dict[str, Any]] | None:
        self._first = None
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting[1]["seconds"]["held"] = held
        return waiting
