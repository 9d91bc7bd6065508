"""The loop of one rank: messages in, a step, token ids out."""

from __future__ import annotations

from tokenspeed.runtime.engine.control import ControlQueue
from tokenspeed.runtime.engine.directives import Begin, Expire, Settle, StreamMessage
from tokenspeed.runtime.engine.outbox import Outbox
from tokenspeed.runtime.engine.stream import Stream
from tokenspeed.runtime.execution.executor import Executor
from tokenspeed.runtime.protocol import Abort, Continue, FlushCache, Pause, Reload, Stop, Submit
from tokenspeed.runtime.scheduler.request import Request
from tokenspeed.runtime.scheduler.scheduler import Scheduler


class EngineLoop:
    """Drives scheduler, control queue and executor in lockstep with the other ranks."""

    def __init__(
        self,
        rank: int,
        stream: Stream,
        outbox: Outbox,
        scheduler: Scheduler,
        executor: Executor,
        control: ControlQueue,
    ):
        self.rank = rank
        self.stream = stream
        self.outbox = outbox
        self.scheduler = scheduler
        self.executor = executor
        self.control = control
        self._stopped = False

    def run(self) -> None:
        """Serve until a `Stop` arrives."""
        while True:
            self._receive()
            if self._stopped:
                return
            self.control.advance()
            self._step()
            # A request that waits, or a pause, changes the loads without any output.
            self.outbox.outputs([], self.scheduler.loads(self.control.paused))

    def _receive(self) -> None:
        directives = self.control.decide() if self.rank == 0 else []
        busy = self.scheduler.has_work or self.control.ready
        for message in self.stream.receive(directives, 0 if busy else self.control.seconds_to_decision()):
            self._handle(message)

    def _step(self) -> None:
        batch = self.scheduler.schedule()
        if batch is not None:
            self.control.publish(self.scheduler.commit(batch, self.executor.run(batch)))

    def _handle(self, message: StreamMessage) -> None:
        match message:
            case Submit():
                self.control.submitted(message.request_id)
                request = Request(message.request_id, message.prompt, message.sampling)
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
