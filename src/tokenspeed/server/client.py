"""One engine as the rest of the front sees it: submits requests, hands out their tokens, makes control calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tokenspeed.errors import TokenSpeedError
from tokenspeed.grammar.definitions import Definitions
from tokenspeed.runtime.protocol.blackbox import Work
from tokenspeed.runtime.protocol.cache import CacheEvents, CacheSnapshot
from tokenspeed.runtime.protocol.calls import (
    Abort,
    Continue,
    DrainMode,
    LoadGrammars,
    Pause,
    Ping,
    Stop,
    Submit,
    ToEngine,
)
from tokenspeed.runtime.protocol.reports import (
    Admitted,
    CallReply,
    Committed,
    Outputs,
    Pong,
    RequestOutput,
    StepFailed,
    ToFront,
)
from tokenspeed.runtime.protocol.state import Loads, ReloadStatus
from tokenspeed.server.cache_events import CacheEventHub
from tokenspeed.server.calls import WAITING_STATES, AnyCall, Calls
from tokenspeed.server.committed import CommittedCode
from tokenspeed.server.errors import EngineLost, EngineUnavailable, QueueFull
from tokenspeed.server.journal import Entry, Journal
from tokenspeed.server.link import Link
from tokenspeed.server.metrics import Metrics, Timing
from tokenspeed.server.progress import Progress
from tokenspeed.server.streams import TokenStream
from tokenspeed.server.suspects import Suspects

log = logging.getLogger(__name__)

NOTHING = Work()


class EngineClient:
    """Requests and calls of one engine, whose ranks may be replaced by others.

    While no ranks are there (`lose` to `serve`) requests and calls are taken and held. At most `most_open` answers
    are owed at a time. With `report_generation` the weight version of an answer names the generation of the forward
    code too. `on_reload_status` is called with each such message.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        most_open: int | None = None,
        report_generation: bool = False,
        size: int = 1,
        patience: float = 30.0,
        on_reload_status: Callable[[ReloadStatus], None],
    ) -> None:
        self.journal = Journal()
        self.loads = Loads()
        self.code = CommittedCode()
        self._metrics = metrics
        self._most_open = most_open
        self._report_generation = report_generation
        self._on_reload_status = on_reload_status
        self._reload_status: ReloadStatus | None = None
        self.progress = Progress(size, patience, self._is_busy)
        self.cache_events = CacheEventHub(self._send)
        self._streams: dict[str, tuple[TokenStream, Timing]] = {}
        self._calls = Calls()
        self._suspects = Suspects(self._submit, self._give)
        self._link: Link | None = None
        self._was_of_use = False
        """Whether the ranks have computed or answered anything."""
        self._unavailable: EngineUnavailable | None = EngineUnavailable(
            "the engine is still starting; try again when it is ready"
        )
        """Why there are no ranks; None while there are."""
        self._closed: EngineUnavailable | None = self._unavailable
        """Why nothing more is taken."""
        self._changed = asyncio.Event()
        self._definitions = Definitions(self._send)

    # ---- ranks ----

    def serve(self, link: Link) -> None:
        """Ranks are ready: give them all that is owed, as far as it has come."""
        if self._closed is self._unavailable:
            self._closed = None
        self._link, self._unavailable = link, None
        self._was_of_use = False
        self.progress.begin_again()
        self._definitions = Definitions(self._send)
        self.cache_events.begin_again()
        if self.loads.paused:
            mode: DrainMode = "keep" if self.loads.held else "wait"
            self._send(Pause(call=self._calls.number(), mode=mode))
        # A pause lets run what was admitted, and nothing else, or nothing at all.
        runs = [entry for entry in self.journal if entry.admitted or not self.loads.paused]
        self._suspects.begin([] if self.loads.held else runs)

    def _give(self) -> None:
        """Give the ranks all that they have not got yet."""
        for entry in self.journal:
            if entry.admitted and not entry.given:
                self._submit(entry)
        # A drain that begins anew waits for what ran before, and holds what did not.
        for call in self._calls.again():
            self._send(call)
        for entry in self.journal:
            if not entry.given:
                self._submit(entry)

    def lose(self, error: EngineLost, work: Work = NOTHING) -> bool:
        """The ranks are gone, and left word of their `work`: end what cannot go on, and keep the rest for others.

        Returns:
            Whether they have done anything, or were about to.
        """
        ran = self.journal.lose(work)
        at_work = bool(self._was_of_use or ran or self._calls or work.reload)
        self._link, self._unavailable = None, EngineUnavailable(f"the ranks are being replaced: {error}")
        stood = self._where_it_stood(work)
        # Steps and reloads take turns: what a reload kept meanwhile has nothing to do with the loss.
        suspected = [] if self.reloading or self._calls.reloads(stood) else ran
        self._calls.lose(error, stood)
        for guilty in self._suspects.lose(suspected, self.journal):
            sentence = f"the ranks were lost {len(guilty.losses)} times while this request ran ({error})"
            self._fail_request(guilty.request_id, TokenSpeedError(sentence))
        for entry in list(self.journal):
            if entry.aborted:
                self._take(_aborted(entry))
            elif entry.abandoned:
                self.journal.end(entry.request_id)
        loads = self.loads
        self._metrics.replaced()
        self._take_loads(
            Loads(
                waiting=len(self.journal),
                total_blocks=loads.total_blocks,
                paused=loads.paused,
                held=loads.held,
                generation=loads.generation,
                weight_version=loads.weight_version,
            )
        )
        self._take_status(ReloadStatus(state="idle", generation=loads.generation))
        self._changed.set()
        return at_work

    def _where_it_stood(self, work: Work) -> ReloadStatus | None:
        """The reload that the ranks were at. What they said last of it may have been lost with them."""
        told = self._reload_status
        if work.reload is None or self.reloading:
            return told
        call_id, state = work.reload
        return ReloadStatus(state=state, generation=self.loads.generation, id=call_id)

    # ---- requests ----

    @property
    def weight_version(self) -> str:
        """Of what computes now, as replies tell it."""
        loads = self.loads
        return f"{loads.weight_version}+g{loads.generation}" if self._report_generation else loads.weight_version

    def load_grammars(self) -> None:
        """Have the ranks load what they need for grammars."""
        self._send(LoadGrammars())

    def submit(self, entries: Sequence[Entry], streams: Sequence[TokenStream], grammar: bytes | None = None) -> None:
        """Journal the answers that a request wants and pass them on; each comes through the stream of its place.

        `grammar` is the compiled form of the entries' own, which is the same for all of them.

        Raises:
            EngineUnavailable: when the engine is starting, stopping or lost.
            QueueFull: when there is no room for all of them.
        """
        self.check_open()
        if self._most_open is not None and len(self.journal) + len(entries) > self._most_open:
            what = "this request does" if len(entries) == 1 else f"the {len(entries)} answers to this request do"
            raise QueueFull(
                f"{what} not fit: {len(self.journal)} of at most {self._most_open} are open; try again later"
            )
        for entry, stream in zip(entries, streams, strict=True):
            entry.compiled = grammar
            self.journal.accept(entry)
            timing = Timing(time.monotonic(), len(entry.prompt), entry.sampling.max_new_tokens)
            self._streams[entry.request_id] = stream, timing
            if self._takes_all:
                self._submit(entry)

    def leave(self, request_id: str) -> None:
        """The client no longer waits: end the request in the engine, unless it has ended."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._abandon(request_id)
            self._metrics.finished("abort", stream[1], time.monotonic())

    def abort(self, client_id: str) -> bool:
        """End the requests with this id; their clients get what there is. False when there are none."""
        named = [entry for entry in self.journal.unfinished() if entry.client_id == client_id]
        for entry in named:
            if entry.given:
                entry.aborted = True
                self._send(Abort(request_id=entry.request_id))
            else:
                self._take(_aborted(entry))
        return bool(named)

    # ---- control ----

    async def call(self, kind: Callable[..., AnyCall], **fields: Any) -> dict[str, Any]:
        """Make a control call and wait for its reply's body.

        Raises:
            EngineUnavailable: when the engine is starting, stopping or lost, or gets lost meanwhile.
        """
        self.check_open()
        call = self._calls.open(kind, **fields)
        if self._takes_all:
            self._send(call.message)
        try:
            return await call.reply
        finally:
            self._calls.close(call)
            self._changed.set()

    def refuse(self, reason: EngineUnavailable) -> None:
        """Take no more requests and calls; those that run go on."""
        self._closed = self._closed or reason

    async def drained(self) -> None:
        """Wait until no request and no call is open, or until a pause holds all requests that are."""
        while self._calls or (self.journal and not self._holds_all()):
            self._changed.clear()
            await self._changed.wait()

    async def keep_asking(self) -> None:
        """Ask the ranks for signs of life, until cancelled."""
        while True:
            await asyncio.sleep(self.progress.interval)
            if self._link is not None:
                self.progress.asked()
                self._send(Ping())

    def stop(self) -> None:
        """Ask the ranks to leave."""
        self._send(Stop())

    def fail(self, error: EngineUnavailable) -> None:
        """End every open request and call with `error`, and refuse new ones."""
        self._closed = error
        streams, self._streams = self._streams, {}
        for stream, timing in streams.values():
            stream.fail(error)
            self._metrics.finished("error", timing, time.monotonic())
        for entry in list(self.journal):
            self.journal.end(entry.request_id)
        self._calls.fail(error)
        self.cache_events.fail(error)
        self._changed.set()

    # ---- messages ----

    def take(self, message: ToFront) -> None:
        """Take in what the ranks say of requests and calls."""
        self.progress.heard(message.rank if isinstance(message, Pong) else 0)
        self._changed.set()
        match message:
            case Outputs():
                self._take_loads(message.loads)
                self._was_of_use = self._was_of_use or bool(message.outputs)
                for output in message.outputs:
                    self._take(output)
            case Admitted():
                self._admit(message.request_ids)
            case CallReply():
                self._take_reply(message)
            case CacheSnapshot():
                self.cache_events.take_snapshot(message)
            case CacheEvents():
                self.cache_events.take_events(message)
            case Committed():
                self.code.take(message)
                # The ranks tell it with their loads as well, but they may be lost before.
                self._take_loads(msgspec.structs.replace(self.loads, generation=message.generation))
                if message.reply is not None:
                    self._calls.commit(message.reply)
            case ReloadStatus():
                self._take_status(message)
            case StepFailed():
                for request_id in message.request_ids:
                    failed = RequestOutput(
                        request_id=request_id, token_ids=[], finish_reason="error", error=message.error
                    )
                    self._take(failed)

    def _admit(self, request_ids: Sequence[str]) -> None:
        now = time.monotonic()
        for request_id in request_ids:
            self.journal.admit(request_id)
            held = self._streams.get(request_id)
            if held is not None and held[1].admitted is None:
                held[1].admitted = now

    def _take_reply(self, reply: CallReply) -> None:
        call = self._calls.answer(reply)
        self._was_of_use |= call is not None  # what the front itself has asked for says nothing
        if isinstance(call, Pause | Continue) and reply.body.get("success"):
            # The ranks tell it with their loads as well, but they may be lost before.
            paused = isinstance(call, Pause)
            held = isinstance(call, Pause) and call.mode == "keep"
            self._take_loads(msgspec.structs.replace(self.loads, paused=paused, held=held))

    def _take_status(self, status: ReloadStatus) -> None:
        self._reload_status = status
        self._on_reload_status(status)

    def _take(self, output: RequestOutput) -> None:
        held = self._streams.get(output.request_id)
        if held is not None:
            stream, timing = held
            step, now = stream.push(output, self.weight_version), time.monotonic()
            self.journal.record(output.request_id, step.token_ids, step.cached_tokens, step.logprobs)
            self._metrics.tokens(step.generated, timing, now)
            if step.finish_reason is not None:
                del self._streams[output.request_id]
                self._metrics.finished(step.finish_reason, timing, now)
                if output.finish_reason is None:
                    self._abandon(output.request_id)
        entry = self.journal.get(output.request_id)
        if output.finish_reason is not None:
            self._end(output.request_id)
        elif entry is not None:
            self._suspects.progress(entry)

    def _end(self, request_id: str) -> None:
        entry = self.journal.get(request_id)
        self.journal.end(request_id)
        if entry is not None:
            self._suspects.end(entry)

    def _take_loads(self, loads: Loads) -> None:
        self.loads = loads
        self._metrics.loads(loads)

    def _submit(self, entry: Entry) -> None:
        """Give the ranks a request with its tokens so far."""
        entry.given, entry.had = True, len(entry.tokens)
        sampling = entry.sampling
        if sampling.grammar is not None and entry.compiled is not None:
            known = self._definitions.define(sampling.grammar, entry.compiled, entry.request_id)
            sampling = msgspec.structs.replace(sampling, grammar=known)
        self._send(
            Submit(
                request_id=entry.request_id,
                prompt=entry.prompt,
                sampling=sampling,
                shares_prompt_with=entry.shares_prompt_with,
                generated=entry.tokens,
                admitted=entry.admitted,
            )
        )

    def _abandon(self, request_id: str) -> None:
        entry = self.journal.get(request_id)
        if entry is not None and not entry.given:
            self._end(request_id)
        elif self.journal.abandon(request_id):
            self._send(Abort(request_id=request_id))

    def _fail_request(self, request_id: str, error: TokenSpeedError) -> None:
        held = self._streams.pop(request_id, None)
        if held is not None:
            stream, timing = held
            stream.fail(error)
            self._metrics.finished("error", timing, time.monotonic())
        self.journal.end(request_id)

    def _holds_all(self) -> bool:
        """Whether the engine is paused and nothing runs, so that nothing ends before somebody ends the pause."""
        return self.loads.held or (self.loads.paused and not self.loads.running)

    @property
    def _takes_all(self) -> bool:
        """Whether there are ranks, and no suspects that have to run alone."""
        return self._link is not None and not self._suspects.trying

    @property
    def reloading(self) -> bool:
        """Whether the ranks execute a reload."""
        return self._reload_status is not None and self._reload_status.state not in WAITING_STATES

    @property
    def slow(self) -> bool:
        """Whether the ranks do a call that keeps them from others."""
        return self._calls.slow

    def _is_busy(self) -> bool:
        """Whether the ranks do something during which they do not answer."""
        return self.reloading or self.slow

    def silence(self) -> float | None:
        """Seconds for which rank 0 says nothing although it has work; None when it has none, or is held."""
        status = self._reload_status
        held = self._link is None or self.loads.paused or (status is not None and status.state != "idle")
        return None if held or not self.journal else self.progress.silence

    def pending_tokens(self) -> int:
        """Tokens of the prompts of which no answer has begun."""
        return sum(len(entry.prompt) for entry in self.journal if not entry.tokens)

    def check_health(self) -> None:
        """Refuse to call the engine healthy when it is not.

        Raises:
            EngineUnavailable: when it is starting, stopping or lost, when its ranks are replaced, or stand still.
        """
        self.check_open()
        if self._unavailable is not None:
            raise self._unavailable
        self.progress.check()

    def check_open(self) -> None:
        """Refuse to take more.

        Raises:
            EngineUnavailable: when the engine is starting, stopping or lost.
        """
        if self._closed is not None:
            raise self._closed

    def _send(self, message: ToEngine) -> None:
        """To the ranks. While there are none nothing is sent: `serve` makes up for it."""
        if self._link is not None:
            self._link.send(message)


def _aborted(entry: Entry) -> RequestOutput:
    """What ends a request that was aborted while no ranks are there to say so."""
    return RequestOutput(request_id=entry.request_id, token_ids=[], finish_reason="abort")
