"""The reload operations of an engine: one reply an id, and where the current one stands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec

from tokenspeed.errors import RequestError
from tokenspeed.runtime.protocol.calls import DrainMode
from tokenspeed.runtime.protocol.refusals import reload_failure
from tokenspeed.runtime.protocol.state import ReloadStatus
from tokenspeed.server.calls import PHASES, Body
from tokenspeed.server.errors import EngineLost, EngineUnavailable

KEPT_REPLIES = 256
"""Finished operations whose reply is still given to the same id."""


class ReloadRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /reload_forward`."""

    id: str
    """Names the operation: the same id again is the same operation, and gets the same reply."""
    mode: DrainMode = "wait"
    """Let the running requests finish, end them with what they have, or keep them: the new code goes on with them."""
    modules: tuple[str, ...] | None = None
    """Reload exactly these modules, changed or not, and their users; null for every changed one."""
    timeout_s: float = 600.0
    """Give up when the running requests have not finished by then; a reload that has begun is never cut short."""
    by: str | None = None
    """Who asks, for `reload_status`."""

    def check(self) -> None:
        """Refuse what the types let through.

        Raises:
            RequestError: with one sentence that names the field.
        """
        if not self.id:
            raise RequestError("id must not be empty; give each reload an id of its own, such as a UUID")
        if self.timeout_s <= 0:
            raise RequestError(f"timeout_s must be above 0, not {self.timeout_s:g}")
        if self.modules is not None and (not self.modules or not all(self.modules)):
            raise RequestError("modules must name at least one module, or be left out for all that changed")


class Reloads:
    """Runs each operation once, however often its id comes, and follows the current one.

    `send` passes a request to the ranks and waits for the body of their reply; `on_finished` sees each body.
    """

    def __init__(
        self,
        send: Callable[[ReloadRequest], Awaitable[Body]],
        on_finished: Callable[[Body], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.generation = 0
        self._send = send
        self._on_finished = on_finished
        self._clock = clock
        self._running: dict[str, tuple[ReloadRequest, asyncio.Task[Body]]] = {}
        self._replies: dict[str, Body] = {}
        self._now: ReloadStatus | None = None
        self._begun: set[str] = set()
        self._since: dict[str, float] = {}
        self._last: Body | None = None

    async def run(self, request: ReloadRequest) -> Body:
        """The reply to `request`; the operation goes on when the caller gives up waiting."""
        if request.id in self._replies:
            return self._replies[request.id]
        if request.id not in self._running:
            self._since[request.id] = self._clock()
            self._running[request.id] = request, asyncio.create_task(self._operate(request))
        return await asyncio.shield(self._running[request.id][1])

    def take(self, message: ReloadStatus) -> None:
        """Note what the ranks say; an operation that has only joined the queue hides none that runs."""
        self.generation = message.generation
        if message.state == "queued":
            return
        self._now = message
        if message.id is not None:
            self._begun.add(message.id)

    def status(self) -> Body:
        """The body of `GET /reload_status`; `elapsed` counts from the arrival of the current operation."""
        now = self._now
        waiting = next((r for r, _ in self._running.values() if r.id not in self._begun), None)
        state, operation, by, detail = "idle", None, None, ""
        if now is not None and now.state != "idle" and now.id in self._running:
            state, operation, by, detail = now.state, now.id, now.by, now.detail
        elif waiting is not None:
            state, operation, by = "queued", waiting.id, waiting.by
        elapsed = self._clock() - self._since[operation] if operation is not None else 0.0
        return {
            "state": state,
            "id": operation,
            "by": by,
            "generation": self.generation,
            "elapsed": round(elapsed, 3),
            "detail": detail,
            "last": self._last,
        }

    async def _operate(self, request: ReloadRequest) -> Body:
        try:
            body = await self._send(request)
        except EngineUnavailable as error:
            rank = error.rank if isinstance(error, EngineLost) else None
            body = reload_failure(request.id, "failed", self._phase(request.id), str(error), rank=rank)
        del self._running[request.id]
        del self._since[request.id]
        self._begun.discard(request.id)
        self._last = self._replies[request.id] = body
        if len(self._replies) > KEPT_REPLIES:
            del self._replies[next(iter(self._replies))]
        if isinstance(body.get("generation"), int):
            self.generation = body["generation"]
        self._on_finished(body)
        return body

    def _phase(self, operation: str) -> str:
        now = self._now
        return PHASES.get(now.state, "queue") if now is not None and now.id == operation else "queue"
