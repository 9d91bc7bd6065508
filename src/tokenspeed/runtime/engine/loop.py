"""The loop of one rank: messages in, a step, token ids out."""

from __future__ import annotations

import logging
from typing import NamedTuple

from tokenspeed.errors import TokenSpeedError, cause_of
from tokenspeed.runtime.cache.watch import IndexWatch
from tokenspeed.runtime.distributed.channel import Channel
from tokenspeed.runtime.distributed.errors import is_victim
from tokenspeed.runtime.engine.agreement import StepDigest
from tokenspeed.runtime.engine.control import ControlQueue
from tokenspeed.runtime.engine.directives import Begin, Expire, Settle, StreamMessage
from tokenspeed.runtime.engine.grammars import Grammars
from tokenspeed.runtime.engine.outbox import Outbox
from tokenspeed.runtime.engine.profiler import Profiler
from tokenspeed.runtime.engine.stream import Stream
from tokenspeed.runtime.execution.executor import Executor
from tokenspeed.runtime.execution.pending import PendingStep
from tokenspeed.runtime.protocol.blackbox import BlackBox
from tokenspeed.runtime.protocol.cache import CacheEvents, CacheSnapshot
from tokenspeed.runtime.protocol.calls import (
    Abort,
    Continue,
    DefineGrammar,
    FlushCache,
    ForgetGrammar,
    LoadGrammars,
    Pause,
    Ping,
    Reload,
    StartProfile,
    Stop,
    StopProfile,
    Submit,
    UnwatchCache,
    WatchCache,
)
from tokenspeed.runtime.protocol.reports import Admitted, RequestOutput
from tokenspeed.runtime.scheduler.batch import Batch
from tokenspeed.runtime.scheduler.request import Request
from tokenspeed.runtime.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)


class Flight(NamedTuple):
    """A step that was launched and not committed."""

    batch: Batch
    step: PendingStep


class EngineLoop:
    """Drives scheduler, control queue and executor in lockstep with the other ranks.

    `digest` takes in every step, where there are other ranks to compare it with. `blackbox` is open where somebody
    may read it.
    With `overlap` one step stays in flight while the next is prepared. What a step's ids end is then noticed one
    step late, and what that step computed for an ended request is dropped.
    """

    def __init__(
        self,
        channel: Channel,
        stream: Stream,
        outbox: Outbox,
        scheduler: Scheduler,
        executor: Executor,
        control: ControlQueue,
        profiler: Profiler,
        grammars: Grammars,
        blackbox: BlackBox,
        digest: StepDigest | None = None,
        *,
        overlap: bool = False,
    ):
        self.channel = channel
        self.stream = stream
        self.outbox = outbox
        self.scheduler = scheduler
        self.executor = executor
        self.control = control
        self.profiler = profiler
        self.grammars = grammars
        self.digest = digest
        self.blackbox = blackbox
        self.overlap = overlap
        self._flight: Flight | None = None
        self._watch: IndexWatch | None = None
        self._stopped = False

    def run(self) -> None:
        """Serve until a `Stop` arrives."""
        while self.turn():
            pass

    def turn(self) -> bool:
        """One round: take what has arrived, then at most one step. False once a `Stop` arrived."""
        self._receive()
        if self._stopped:
            return False
        self.control.advance()
        self._step()
        self._tell_cache_events()
        if self.control.reload is not None:
            self.control.reload.code.tell_imports()
        # A request that waits, or a pause, changes the loads without any output.
        self.outbox.outputs([], self.control.loads())
        return True

    def _tell_cache_events(self) -> None:
        if self._watch is not None and (events := self._watch.take()):
            self.outbox.send(CacheEvents(events=events))

    def _watch_cache(self, message: WatchCache) -> None:
        if self.channel.rank == 0:  # all ranks have the same index, and one voice is enough
            self._tell_cache_events()
            self._watch = self._watch or IndexWatch()
            self.outbox.send(CacheSnapshot(watch=message.watch, stored=self.scheduler.cache.watch(self._watch)))

    def _unwatch_cache(self) -> None:
        self._watch = None
        self.scheduler.cache.watch(None)

    def _receive(self) -> None:
        directives = self.control.decide() if self.channel.rank == 0 else []
        busy = self._flight is not None or self.scheduler.has_work or self.control.ready
        for message in self.stream.receive(directives, 0 if busy else self.control.seconds_to_decision()):
            self._handle(message)

    def _step(self) -> None:
        """Launch the next step, then commit the one before: the host prepares one while the device computes one."""
        with self.executor.ranges("schedule"):
            batch = self.scheduler.schedule()
        if admitted := self.scheduler.take_admitted():
            self._note(admitted)
            self.outbox.send(Admitted(request_ids=admitted))
        launched = self._launch(batch) if batch is not None else None
        self._commit()
        self._flight = launched
        if not self.overlap:
            self._commit()

    def _note(self, admitted: list[str]) -> None:
        """Leave word of what is about to be computed, in case that ends this process."""
        if self.blackbox.full:
            self.blackbox.open()
            admitted = self.scheduler.running_ids
        self.blackbox.runs(admitted)

    def _launch(self, batch: Batch) -> Flight | None:
        """Start one step. Edited code may fail in a batch that warm-up did not run: its requests end, no others."""
        self.profiler.before(batch)
        try:
            return Flight(batch, self.executor.launch(batch))
        except BaseException as error:
            self._commit()
            self._fail(batch, error)
            return None
        finally:
            self.profiler.after(batch)

    def _commit(self) -> None:
        """Wait for the step in flight, if there is one, and take what it computed."""
        if self._flight is None:
            return
        flight, self._flight = self._flight, None
        try:
            with self.executor.ranges("wait"):
                result = flight.step.wait()
        except BaseException as error:
            self._fail(flight.batch, error)
        else:
            if self.digest is not None:
                self.digest.add(flight.batch, result)
            with self.executor.ranges("commit"):
                self.control.publish(self.scheduler.commit(flight.batch, *result))

    def _fail(self, batch: Batch, error: BaseException) -> None:
        sentence = f"the forward pass failed with {cause_of(error)}"
        try:
            if self.channel.size > 1:
                raise error  # another rank may have computed the step, and schedulers that differ mix up requests
            self.executor.check_device(error)
        except BaseException:
            if not is_victim(error, self.channel.rank):
                self.outbox.step_failed([row.request.request_id for row in batch.rows], sentence)
            raise
        log.error("a step failed; the requests in it end, the server goes on", exc_info=error)
        self.control.publish(self.scheduler.fail(batch, sentence))

    def _submit(self, message: Submit) -> list[RequestOutput]:
        grammar = message.sampling.grammar
        try:
            state = None if grammar is None else self.grammars.begin(grammar.key, message.generated)
        except TokenSpeedError as error:
            return self.scheduler.refuse(message.request_id, str(error))
        return self.scheduler.submit(
            Request(
                message.request_id,
                message.prompt,
                message.sampling,
                message.shares_prompt_with,
                state,
                message.generated,
                message.admitted,
            )
        )

    def _handle(self, message: StreamMessage) -> None:
        match message:
            case Submit():
                with self.blackbox.taking(message.request_id):
                    self.control.submitted(message.request_id)
                    self.control.publish(self._submit(message))
            case LoadGrammars():
                self.grammars.load()
            case DefineGrammar():
                with self.blackbox.taking(message.request_id):
                    self.grammars.define(message.key, message.compiled)
            case ForgetGrammar():
                self.grammars.forget(message.key)
            case WatchCache():
                self._watch_cache(message)
            case UnwatchCache():
                self._unwatch_cache()
            case Abort():
                self.control.publish(self.scheduler.abort(message.request_id))
            case Reload():
                self.control.add(message)
            case Begin():
                self.control.begin(message)
            case Settle():
                self.control.settle(message)
            case Expire():
                self.control.expire(message)
            case Pause():
                self.control.pause(message)
            case Continue():
                self.control.resume(message)
            case FlushCache():
                self.control.flush(message)
            case StartProfile():
                self.profiler.start(message)
            case StopProfile():
                self.profiler.stop(message)
            case Ping():
                self.outbox.pong()
            case Stop():
                self._stopped = True
