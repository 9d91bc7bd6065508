"""One rank in the test's own process: the real start-up, scheduler, executor and loop, without the front."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenspeed.runtime.config import Config
from tokenspeed.runtime.distributed.channel import Channel
from tokenspeed.runtime.engine.control import ControlQueue
from tokenspeed.runtime.engine.directives import Directive, StreamMessage
from tokenspeed.runtime.engine.grammars import Grammars
from tokenspeed.runtime.engine.loop import EngineLoop
from tokenspeed.runtime.engine.profiler import Profiler
from tokenspeed.runtime.engine.startup import Startup
from tokenspeed.runtime.protocol.blackbox import BlackBox
from tokenspeed.runtime.protocol.calls import ControlCall, Stop, Submit
from tokenspeed.runtime.protocol.message import Message
from tokenspeed.runtime.protocol.reports import CallReply, Outputs, RequestOutput
from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.runtime.protocol.state import Loads


class MemoryStream:
    """Messages that the test put there; the loop stops where it would wait for more."""

    def __init__(self) -> None:
        self.messages: list[StreamMessage] = []

    def receive(self, directives: Sequence[Directive], wait_s: float | None) -> list[StreamMessage]:
        received = [*self.messages, *directives]
        self.messages.clear()
        return received if received or wait_s == 0 else [Stop()]


class MemoryOutbox:
    """Keeps what the engine says."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def outputs(self, outputs: list[RequestOutput], loads: Loads) -> None:
        self.send(Outputs(outputs=outputs, loads=loads))

    def reply(self, call: ControlCall, body: dict[str, Any]) -> None:
        self.send(CallReply(call=call.call, body=body))


class InProcessEngine:
    """An engine that the test drives."""

    def __init__(self, config: Config, run_dir: Path, *, overlap: bool | None = None):
        """`overlap` None is what a server does on this device."""
        self.overlap = overlap
        self.outbox = MemoryOutbox()
        self.startup = Startup(config, Channel(0, 1, run_dir), self.outbox)  # type: ignore[arg-type]
        self.stream = MemoryStream()

    def start(self) -> InProcessEngine:
        """Load the model."""
        self.startup.run()
        self.scheduler = self.startup.scheduler
        self.executor = self.startup.executor
        channel, outbox = self.startup.channel, self.outbox
        self.control = ControlQueue(self.scheduler, outbox, None)  # type: ignore[arg-type]
        self.profiler = Profiler(channel, outbox, self.startup.device.type)  # type: ignore[arg-type]
        source = self.startup.source
        self.grammars = Grammars(source.tokenizer_dir, source.config.vocab_size, source.config.eos_token_ids)
        if self.overlap is None:
            self.overlap = self.startup.device.type != "cpu"
        return self

    def loop(self) -> EngineLoop:
        """A loop over what was submitted; it stops where it would wait for more."""
        return EngineLoop(
            self.startup.channel,
            self.stream,
            self.outbox,  # type: ignore[arg-type]
            self.scheduler,
            self.executor,
            self.control,
            self.profiler,
            self.grammars,
            BlackBox(0, self.startup.channel.run_dir),  # which notes nothing
            overlap=bool(self.overlap),
        )

    def generate(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> list[list[int]]:
        """The answers to `prompts`, all submitted at once."""
        submits = [Submit(request_id=str(i), prompt=prompt, sampling=sampling) for i, prompt in enumerate(prompts)]
        return [[token for output in outputs for token in output.token_ids] for outputs in self.serve(submits)]

    def serve(self, submits: Sequence[Submit]) -> list[list[RequestOutput]]:
        """The outputs of each request, all submitted at once."""
        self.outbox.sent.clear()
        self.stream.messages.extend(submits)
        self.loop().run()
        outputs: dict[str, list[RequestOutput]] = {submit.request_id: [] for submit in submits}
        for message in self.outbox.sent:
            if isinstance(message, Outputs):
                for output in message.outputs:
                    outputs[output.request_id].append(output)
        return list(outputs.values())
