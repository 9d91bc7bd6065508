"""The ZMQ link to rank 0: submits requests, hands out their tokens, makes control calls."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from tokenspeed.errors import ResourceError
from tokenspeed.grammar.definitions import Definitions
from tokenspeed.runtime.protocol import (
    Abort,
    Admitted,
    CacheEvents,
    CacheSnapshot,
    CallReply,
    Continue,
    EngineInfo,
    Failed,
    FlushCache,
    LoadGrammars,
    Loads,
    Outputs,
    Pause,
    Ping,
    Pong,
    Ready,
    Reload,
    ReloadStatus,
    RequestOutput,
    Starting,
    StartProfile,
    Stop,
    StopProfile,
    Submit,
    ToEngine,
    ToFront,
)
from tokenspeed.server.cache_events import CacheEventHub
from tokenspeed.server.errors import EngineLost, EngineUnavailable, QueueFull
from tokenspeed.server.journal import Entry, Journal
from tokenspeed.server.metrics import Metrics, Timing
from tokenspeed.server.progress import Progress
from tokenspeed.server.streams import TokenStream

log = logging.getLogger(__name__)

AnyCall = Reload | Pause | Continue | FlushCache | StartProfile | StopProfile

SLOW_CALLS = (StartProfile, StopProfile)
"""Calls that keep the ranks from answering others."""

WAITING_STATES = ("idle", "queued", "draining")
"""States of a reload in which the ranks do their other work."""

LONGEST_SOCKET_PATH = 107
"""Bytes of a Unix socket's address on Linux."""


class OpenCall(NamedTuple):
    """A control call whose reply is awaited."""

    reply: asyncio.Future[dict[str, Any]]
    slow: bool


class EngineClient:
    """One engine as the rest of the front sees it.

    At most `most_open` answers are owed at a time. With `report_generation` the weight version of an answer names
    the generation of the forward code too.

    `on_starting` and `on_reload_status` are called with each such message, `on_lost` once, when a rank
    reports that it cannot go on.
    """

    def __init__(
        self,
        run_dir: Path,
        metrics: Metrics,
        *,
        most_open: int | None = None,
        report_generation: bool = False,
        size: int = 1,
        patience: float = 30.0,
        on_starting: Callable[[Starting], None],
        on_reload_status: Callable[[ReloadStatus], None],
        on_lost: Callable[[EngineLost], None],
    ) -> None:
        self.info: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self.journal = Journal()
        self.loads = Loads()
        self._run_dir = run_dir
        self._metrics = metrics
        self._most_open = most_open
        self._report_generation = report_generation
        self._on_starting = on_starting
        self._on_reload_status = on_reload_status
        self._on_lost = on_lost
        self._reload_state = "idle"
        self.progress = Progress(size, patience, self._is_busy)
        self.cache_events = CacheEventHub(self._send)
        self._streams: dict[str, tuple[TokenStream, Timing]] = {}
        self._calls: dict[int, OpenCall] = {}
        self._call_numbers = itertools.count(1)
        self._closed: EngineUnavailable | None = None
        self._changed = asyncio.Event()
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)
        self._definitions = Definitions(self._send)

    def bind(self) -> None:
        """Open both sockets.

        Raises:
            ResourceError: when the run directory's path is too long for a socket.
        """
        self._to_rank0 = self._context.socket(zmq.PUSH)
        self._from_ranks = zmq.asyncio.Context(self._context).socket(zmq.PULL)
        sockets: tuple[tuple[zmq.Socket[Any], str], ...] = (
            (self._to_rank0, "to_rank0"),
            (self._from_ranks, "from_rank0"),
        )
        for socket, name in sockets:
            address = bind_address(self._run_dir, name)
            # No high-water mark: a send never blocks the loop, and nothing is dropped.
            socket.set_hwm(0)
            socket.linger = 0
            socket.bind(address)

    def close(self) -> None:
        """Close what `bind` opened."""
        for socket in (self._to_rank0, self._from_ranks):
            socket.close(linger=0)
        self._context.term()

    async def receive(self) -> None:
        """Take in messages until cancelled."""
        while True:
            self._dispatch(self._decoder.decode(await self._from_ranks.recv()))

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
            self.journal.accept(entry)
            timing = Timing(time.monotonic(), len(entry.prompt), entry.sampling.max_new_tokens)
            self._streams[entry.request_id] = stream, timing
            sampling = entry.sampling
            if sampling.grammar is not None and grammar is not None:
                sampling = msgspec.structs.replace(
                    sampling, grammar=self._definitions.define(sampling.grammar, grammar)
                )
            self._send(
                Submit(
                    request_id=entry.request_id,
                    prompt=entry.prompt,
                    sampling=sampling,
                    shares_prompt_with=entry.shares_prompt_with,
                )
            )

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
            self._send(Abort(request_id=entry.request_id))
        return bool(named)

    # ---- control ----

    async def call(self, kind: Callable[..., AnyCall], **fields: Any) -> dict[str, Any]:
        """Make a control call and wait for its reply's body.

        Raises:
            EngineUnavailable: when the engine is starting, stopping or lost, or gets lost meanwhile.
        """
        self.check_open()
        number = next(self._call_numbers)
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[number] = OpenCall(reply, slow=kind in SLOW_CALLS)
        self._send(kind(call=number, **fields))
        try:
            return await reply
        finally:
            self._calls.pop(number, None)
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
        for call in self._calls.values():
            if not call.reply.done():
                call.reply.set_exception(error)
        self.cache_events.fail(error)
        if not self.info.done():
            self.info.cancel()
        self._changed.set()

    # ---- messages ----

    def _dispatch(self, message: ToFront) -> None:
        self.progress.heard(message.rank if isinstance(message, Pong | Failed) else 0)
        self._changed.set()
        match message:
            case Outputs():
                self._take_loads(message.loads)
                for output in message.outputs:
                    self._take(output)
            case Admitted():
                now = time.monotonic()
                for held in map(self._streams.get, message.request_ids):
                    if held is not None:
                        held[1].admitted = now
            case CallReply():
                call = self._calls.get(message.call)
                if call is not None and not call.reply.done():
                    call.reply.set_result(message.body)
            case CacheSnapshot():
                self.cache_events.take_snapshot(message)
            case CacheEvents():
                self.cache_events.take_events(message)
            case ReloadStatus():
                self._reload_state = message.state
                self._on_reload_status(message)
            case Starting():
                self._on_starting(message)
            case Ready():
                self._metrics.started(message.info)
                if not self.info.done():
                    self.info.set_result(message.info)
            case Failed():
                self._on_lost(EngineLost(message.message, rank=message.rank, exit_code=message.exit_code))

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
        if output.finish_reason is not None:
            self.journal.end(output.request_id)

    def _take_loads(self, loads: Loads) -> None:
        self.loads = loads
        self._metrics.loads(loads)

    def _abandon(self, request_id: str) -> None:
        if self.journal.abandon(request_id) and not isinstance(self._closed, EngineLost):
            self._send(Abort(request_id=request_id))

    def _holds_all(self) -> bool:
        """Whether the engine is paused and nothing runs, so that nothing ends before somebody ends the pause."""
        return self.loads.paused and not self.loads.running

    def _is_busy(self) -> bool:
        """Whether the ranks do something during which they do not answer."""
        return self._reload_state not in WAITING_STATES or any(call.slow for call in self._calls.values())

    def silence(self) -> float | None:
        """Seconds for which rank 0 says nothing although it has work; None when it has none, or is held."""
        held = self.loads.paused or self._reload_state != "idle"
        return None if held or not self.journal else self.progress.silence

    def pending_tokens(self) -> int:
        """Tokens of the prompts of which no answer has begun."""
        return sum(len(entry.prompt) for entry in self.journal if not entry.tokens)

    def check_health(self) -> None:
        """Refuse to call the engine healthy when it is not.

        Raises:
            EngineUnavailable: when it is starting, stopping, lost, or stands still.
        """
        self.check_open()
        self.progress.check()

    def check_open(self) -> None:
        if self._closed is not None:
            raise self._closed
        if not self.info.done():
            raise EngineUnavailable("the engine is still starting; try again when it is ready")

    def _send(self, message: ToEngine) -> None:
        try:
            self._to_rank0.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            # Rank 0 has hung up; its exit is noticed by the one who started it, and fails everything.
            log.debug("rank 0 is gone, %s was not sent", type(message).__name__)


def bind_address(run_dir: Path, name: str) -> str:
    """Address of one of the sockets between front and ranks.

    Raises:
        ResourceError: when the run directory's path is too long for a socket.
    """
    path = run_dir / name
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise ResourceError(f"the path {path} is too long for a socket; set TMPDIR to a shorter directory")
    return f"ipc://{path}"
