"""The control calls that wait for their answer, and what becomes of them when the ranks are lost."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenspeed.runtime.protocol.calls import Continue, FlushCache, Pause, Reload, StartProfile, StopProfile
from tokenspeed.runtime.protocol.refusals import reload_failure
from tokenspeed.runtime.protocol.reports import CallReply
from tokenspeed.runtime.protocol.state import ReloadStatus
from tokenspeed.server.errors import EngineLost, EngineUnavailable

AnyCall = Reload | Pause | Continue | FlushCache | StartProfile | StopProfile
Body = dict[str, Any]

SLOW_CALLS = (StartProfile, StopProfile)
"""Calls that keep the ranks from answering others."""

PHASES = {
    "draining": "drain",
    "reading": "read",
    "patching": "patch",
    "warming": "warm",
    "graphs": "graphs",
    "committing": "commit",
    "undoing": "commit",
}
"""The phase that a reply names, by the state that `reload_status` shows."""

WAITING_STATES = ("idle", "queued", "draining")
"""States of a reload in which the ranks do their other work."""


@dataclass
class OpenCall:
    """A call whose reply is awaited."""

    message: AnyCall
    reply: asyncio.Future[Body]
    made: float
    """By the clock of `Calls`."""
    committed: Body | None = None
    """What the reply of a reload will say: its code serves already."""


class Calls:
    """The open calls in the order in which they were made, by number."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count(1)
        self._open: dict[int, OpenCall] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def slow(self) -> bool:
        """Whether one of them keeps the ranks from answering others."""
        return any(isinstance(call.message, SLOW_CALLS) for call in self._open.values())

    def number(self) -> int:
        """A number that no other call has."""
        return next(self._numbers)

    def open(self, kind: Callable[..., AnyCall], **fields: Any) -> OpenCall:
        """Begin a call."""
        message = kind(call=self.number(), **fields)
        call = self._open[message.call] = OpenCall(message, asyncio.get_running_loop().create_future(), self._clock())
        return call

    def close(self, call: OpenCall) -> None:
        """Nobody waits for the reply any more."""
        self._open.pop(call.message.call, None)

    def answer(self, reply: CallReply) -> AnyCall | None:
        """Hand out a reply, and say to what; None when nobody waits for it."""
        call = self._open.get(reply.call)
        if call is None or call.reply.done():
            return None
        call.reply.set_result(reply.body)
        return call.message

    def commit(self, reply: CallReply) -> None:
        """Note what a reload that has committed will be answered."""
        call = self._open.get(reply.call)
        if call is not None:
            call.committed = reply.body

    def fail(self, error: EngineUnavailable) -> None:
        """End every call with `error`."""
        for call in self._open.values():
            if not call.reply.done():
                call.reply.set_exception(error)

    def reloads(self, status: ReloadStatus | None) -> bool:
        """Whether one of them is the reload of `status`, and ran."""
        return status is not None and any(
            isinstance(call.message, Reload) and not call.reply.done() and _runs(call.message, status)
            for call in self._open.values()
        )

    def lose(self, error: EngineLost, status: ReloadStatus | None) -> None:
        """The ranks are lost: answer what cannot be begun again. `status` is where the reloads stood."""
        for call in self._open.values():
            message = call.message
            if call.committed is not None:
                self.answer(CallReply(call=message.call, body=call.committed))
            elif isinstance(message, Reload) and status is not None and _runs(message, status):
                self.answer(CallReply(call=message.call, body=_cut_short(message, error, status)))
            elif isinstance(message, StartProfile | StopProfile):
                sentence = f"the profile is lost with the ranks that recorded it ({error}); start another one"
                body = {"success": False, "code": "failed", "message": sentence, "error": sentence}
                self.answer(CallReply(call=message.call, body=body))

    def again(self) -> list[AnyCall]:
        """The calls that other ranks have to answer, in the order in which they were made."""
        return [self._again(call) for call in self._open.values() if not call.reply.done()]

    def _again(self, call: OpenCall) -> AnyCall:
        message = call.message
        if not isinstance(message, Reload):
            return message
        # It has waited before; what is left may be nothing, which the ranks answer at once.
        left = message.timeout_s - (self._clock() - call.made)
        return msgspec.structs.replace(message, timeout_s=max(0.0, left))


def _runs(message: Reload, status: ReloadStatus) -> bool:
    return status.id == message.id and status.state not in WAITING_STATES


def _cut_short(message: Reload, error: EngineLost, status: ReloadStatus) -> Body:
    """The reply of a reload that ran when the ranks were lost: other ranks serve the code from before it."""
    # What is being undone says which phase had failed.
    phase = (status.state == "undoing" and status.detail) or PHASES[status.state]
    body = reload_failure(message.id, "failed", phase, str(error), rank=error.rank)
    place = f" ({error.file}:{error.line})" if error.file else ""
    body |= {"file": error.file, "line": error.line, "text": error.text, "trace": [], "undone": True}
    body["message"] = (
        f"failed in {phase}: {error}{place}; undone, the ranks are replaced and serve generation {status.generation} on"
    )
    return body
