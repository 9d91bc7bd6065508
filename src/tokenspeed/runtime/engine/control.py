"""The control queue of one rank: reloads in arrival order, and the pause.

Every rank meets the same messages in the same order and so holds the same queue. What depends on time or on
files is decided by rank 0 alone (`decide`) and comes back to all as a directive.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from tokenspeed.runtime.engine.directives import Begin, Directive, Expire, Settle
from tokenspeed.runtime.engine.held import HeldRequests
from tokenspeed.runtime.engine.outbox import Outbox
from tokenspeed.runtime.protocol.calls import Continue, ControlCall, FlushCache, Pause, Reload
from tokenspeed.runtime.protocol.refusals import NOT_ENABLED, reload_failure
from tokenspeed.runtime.protocol.reports import RequestOutput
from tokenspeed.runtime.protocol.state import Loads, ReloadStatus
from tokenspeed.runtime.reload.failures import CostRanks
from tokenspeed.runtime.reload.forward import ForwardReload
from tokenspeed.runtime.scheduler.scheduler import Scheduler


@dataclass
class Entry:
    """A reload that waits for its turn or for its drain."""

    call: Reload
    arrived: float
    """`time.monotonic` of this rank; only rank 0 decides by it."""
    draining: bool = False

    @property
    def phase(self) -> str:
        """Where it waits, as a reply names it."""
        return "drain" if self.draining else "queue"


class ControlQueue:
    """Reloads, the pause, and the calls that act at once."""

    def __init__(self, scheduler: Scheduler, outbox: Outbox, reload: ForwardReload | None):
        self.scheduler = scheduler
        self.outbox = outbox
        self.reload = reload
        self.paused = False
        self.keeping = False
        """The pause holds running requests where they are."""
        self.held = HeldRequests()
        self._entries: deque[Entry] = deque()
        self._pausing: list[Pause] = []

    # ---- rank 0 decides ----

    def decide(self) -> list[Directive]:
        """What rank 0's clock and files say about the queue now."""
        now = time.monotonic()
        expired = [e for e in self._entries if now - e.arrived >= e.call.timeout_s]
        directives: list[Directive] = [Expire(id=entry.call.id) for entry in expired]
        if self._entries and self._entries[0] not in expired and not self._entries[0].draining:
            directives.append(self._look_at(self._entries[0].call))
        return directives

    def seconds_to_decision(self) -> float | None:
        """Seconds until `decide` may have something new to say; None while only a message can change that."""
        if not self._entries:
            return None
        now = time.monotonic()
        return max(0.0, min(entry.arrived + entry.call.timeout_s - now for entry in self._entries))

    def _look_at(self, call: Reload) -> Directive:
        assert self.reload is not None
        settled = self.reload.settle_early(call)
        return Begin(id=call.id) if settled is None else Settle(id=call.id, body=settled)

    # ---- every rank obeys ----

    def add(self, call: Reload) -> None:
        """Queue a reload; from now on new requests are held."""
        if self.reload is None:
            self.outbox.reply(call, reload_failure(call.id, "not_enabled", "queue", NOT_ENABLED))
            return
        self._entries.append(Entry(call, time.monotonic()))
        self._gate()
        self._status("queued", call)

    def begin(self, directive: Begin) -> None:
        """Start the drain of the head."""
        entry = self._head(directive.id)
        if entry is None:
            return
        entry.draining = True
        self._gate()
        self._status("draining", entry.call)
        if entry.call.mode == "abort":
            self.publish(self.scheduler.abort_running())

    def settle(self, directive: Settle) -> None:
        """End the head without running it."""
        entry = self._head(directive.id)
        if entry is not None:
            self._entries.popleft()
            self._end(entry.call, directive.body)

    def expire(self, directive: Expire) -> None:
        """End a reload that waited too long."""
        for entry in [e for e in self._entries if e.call.id == directive.id]:
            self._entries.remove(entry)
            message = f"not drained within timeout_s = {entry.call.timeout_s:g} s; nothing was changed"
            self._end(entry.call, reload_failure(entry.call.id, "timeout", entry.phase, message))

    def pause(self, call: Pause) -> None:
        """Close admission. `wait` answers when the running requests are done, `abort` ends them first, and `keep` holds
        them too and answers once no step is in flight. The last call says what becomes of running requests."""
        self.paused = True
        self.keeping = call.mode == "keep"
        self._gate()
        self._pausing.append(call)
        if call.mode == "abort":
            self.publish(self.scheduler.abort_running())

    def resume(self, call: Continue) -> None:
        """Cancel the reloads and the pauses that wait, then open admission."""
        for entry in self._entries:
            message = "cancelled by continue_generation before it ran; nothing was changed"
            self._answer(entry.call, reload_failure(entry.call.id, "cancelled", entry.phase, message))
        cancelled = len(self._entries) + len(self._pausing)
        self._entries.clear()
        for pause in self._pausing:
            self.outbox.reply(pause, {"success": False, "message": "cancelled by continue_generation"})
        self._pausing.clear()
        was_paused, self.paused, self.keeping = self.paused, False, False
        self._gate()
        self._status("idle")
        message = "generation continues" if was_paused else "generation was not paused"
        self.outbox.reply(call, {"success": True, "message": message, "cancelled": cancelled})

    def flush(self, call: FlushCache) -> None:
        """Forget the prefix index."""
        self.scheduler.flush_cache()
        self.outbox.reply(call, {"success": True, "message": "prefix cache flushed"})

    @property
    def ready(self) -> bool:
        """`advance` would do something now."""
        return self._pauses_are_done or self._head_is_due

    def advance(self) -> None:
        """Answer the pauses that are done, then run the reload at the head, once what it waits for has ended."""
        if self._pauses_are_done:
            running = len(self.scheduler.running_ids)
            message = f"paused; {running} running request(s) are held" if running else "paused"
            for pause in self._pausing:
                self.outbox.reply(pause, {"success": True, "message": message})
            self._pausing.clear()
        if self._head_is_due:
            assert self.reload is not None
            entry = self._entries.popleft()
            for request_id in self.scheduler.running_ids[:1]:
                self.held.begin(request_id)
            try:
                body = self.reload.run(entry.call, drained_after=time.monotonic() - entry.arrived)
            except CostRanks as error:
                self.outbox.reply(entry.call, error.body)
                raise
            self._end(entry.call, body)

    @property
    def _pauses_are_done(self) -> bool:
        return bool(self._pausing) and self._is_done(self.keeping)

    @property
    def _head_is_due(self) -> bool:
        head = self._entries[0] if self._entries else None
        return head is not None and head.draining and self._is_done(self.keeping or head.call.mode == "keep")

    def _is_done(self, keeping: bool) -> bool:
        """Whether nothing runs any more, or no step where running requests are held: then nothing would ever end."""
        return not self.scheduler.in_flight if keeping else self.scheduler.drained

    def loads(self) -> Loads:
        """What is held now, and why."""
        return self.scheduler.loads(self.paused, self.keeping)

    def submitted(self, request_id: str) -> None:
        """A request arrived; remember the first one that a reload holds."""
        if self._entries:
            self.held.begin(request_id)

    def publish(self, outputs: list[RequestOutput]) -> None:
        """Send outputs to the front, then the reload's reply that waited for the first held request's first token."""
        if outputs:
            self.outbox.outputs(outputs, self.loads())
            self._send(self.held.progressed(outputs))

    def _head(self, call_id: str) -> Entry | None:
        """The head, if it is still the one that a directive speaks of: a call in between may have cancelled it."""
        return self._entries[0] if self._entries and self._entries[0].call.id == call_id else None

    def _end(self, call: Reload, body: dict[str, Any]) -> None:
        self._gate()
        self._answer(call, body)
        if self._entries:
            head = self._entries[0]
            self._status("draining" if head.draining else "queued", head.call)
        else:
            self._status("idle")

    def _answer(self, call: Reload, body: dict[str, Any]) -> None:
        reloaded = body["success"] and body["modules"]
        if not (reloaded and self.held.answer_after(call, body)):
            self.outbox.reply(call, body)
        elif not self.scheduler.admission_open:
            self._send(self.held.give_up())

    def _send(self, kept: tuple[ControlCall, dict[str, Any]] | None) -> None:
        if kept is not None:
            self.outbox.reply(*kept)

    def _gate(self) -> None:
        """Admission is closed by a pause and by anything in the queue; running requests are held by what keeps them."""
        self.scheduler.admission_open = not self.paused and not self._entries
        head = self._entries[0] if self._entries else None
        keeps = head is not None and head.draining and head.call.mode == "keep"
        self.scheduler.holds_running = self.keeping or keeps
        if not self.scheduler.admission_open:
            # Who waits for the first token of a held request might now wait for as long as a pause lasts.
            self._send(self.held.give_up())

    def _status(self, state: str, call: Reload | None = None) -> None:
        generation = self.reload.generation if self.reload is not None else 0
        by, call_id = (call.by, call.id) if call is not None else (None, None)
        self.outbox.send(ReloadStatus(state=state, generation=generation, id=call_id, by=by))
