"""The loop of one rank: messages in, a step, token ids out."""

from __future__ import annotations

import logging
import traceback

from tokenspeed.runtime.distributed.channel import Channel
from tokenspeed.runtime.engine.control import ControlQueue
from tokenspeed.runtime.engine.directives import Begin, Expire, Settle, StreamMessage
from tokenspeed.runtime.engine.outbox import Outbox
from tokenspeed.runtime.engine.stream import Stream
from tokenspeed.runtime.execution.executor import Executor
from tokenspeed.runtime.protocol import (
    Abort,
    Admitted,
    Continue,
    FlushCache,
    Pause,
    Reload,
    RequestOutput,
    Stop,
    Submit,
)
from tokenspeed.runtime.scheduler.batch import Batch
from tokenspeed.runtime.scheduler.request import Request
from tokenspeed.runtime.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)


class EngineLoop:
    """Drives scheduler, control queue and executor in lockstep with the other ranks."""

    def __init__(
        self,
        channel: Channel,
        stream: Stream,
        outbox: Outbox,
        scheduler: Scheduler,
        executor: Executor,
        control: ControlQueue,
    ):
        self.channel = channel
        self.stream = stream
        self.outbox = outbox
        self.scheduler = scheduler
        self.executor = executor
        self.control = control
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
        # A request that waits, or a pause, changes the loads without any output.
        self.outbox.outputs([], self.scheduler.loads(self.control.paused))
        return True

    def _receive(self) -> None:
        directives = self.control.decide() if self.channel.rank == 0 else []
        busy = self.scheduler.has_work or self.control.ready
        for message in self.stream.receive(directives, 0 if busy else self.control.seconds_to_decision()):
            self._handle(message)

    def _step(self) -> None:
        batch = self.scheduler.schedule()
        if admitted := self.scheduler.take_admitted():
            self.outbox.send(Admitted(request_ids=admitted))
        if batch is not None:
            self.control.publish(self._run(batch))

    def _run(self, batch: Batch) -> list[RequestOutput]:
        """Compute one step. Edited code may fail in a batch that warm-up did not run: its requests end, no others."""
        try:
            result = self.executor.run(batch)
        except BaseException as error:
            if self.channel.size > 1:
                raise  # another rank may have computed the step, and schedulers that differ mix up requests
            log.exception("a step failed; the requests in it end, the server goes on")
            cause = traceback.format_exception_only(error)[-1].strip()
            return self.scheduler.fail(batch, f"the forward pass failed with {cause}")
        return self.scheduler.commit(batch, *result)

    def _handle(self, message: StreamMessage) -> None:
        match message:
            case Submit():
                self.control.submitted(message.request_id)
                request = Request(message.request_id, message.prompt, message.sampling, message.shares_prompt_with)
                self.control.publish(self.scheduler.submit(request))
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
            case Stop():
                self._stopped = True
