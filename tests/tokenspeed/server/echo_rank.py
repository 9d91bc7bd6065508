"""A rank process that speaks the real protocol without a model: it answers a prompt with its own text tokens.

It is for the logic of the front alone. `echo.json` in the front's run directory says how it behaves (`Behaviour`),
and everything that rank 0 receives is appended to `received.jsonl` there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tokenspeed.runtime.protocol.blackbox import BlackBox
from tokenspeed.runtime.protocol.cache import CacheSnapshot
from tokenspeed.runtime.protocol.calls import (
    Abort,
    Continue,
    FlushCache,
    Pause,
    Ping,
    Reload,
    StartProfile,
    Stop,
    StopProfile,
    Submit,
    ToEngine,
    WatchCache,
)
from tokenspeed.runtime.protocol.reports import (
    Admitted,
    CallReply,
    Failed,
    FinishReason,
    Outputs,
    Pong,
    Ready,
    RequestOutput,
    Starting,
    StepFailed,
    ToFront,
    TokenLogprobs,
)
from tokenspeed.runtime.protocol.state import EngineInfo, Loads, ReloadStatus

EOS = 257
VOCAB_SIZE = 260
BLOCK_SIZE = 16


class Behaviour(msgspec.Struct, frozen=True):
    """What a test wants of the engine. `start` is `ready`, `unstable` (which ends then), `never`, `failed` or
    an exit code.

    `restarts` are the same for the sets of ranks that replace the first; the last one holds for all further ones.
    A request whose prompt has the token `poison` ends the rank, one with `broken` makes a step fail, and for one with
    `garbled` the rank says what is no message.
    A step after the first `free_steps`, and with `reload_waits` a reload, wait for the file `go` in the run directory.
    """

    start: str = "ready"
    restarts: tuple[str, ...] = ("ready",)
    poison: int = -1
    broken: int = -1
    garbled: int = -1
    step_seconds: float = 0.0
    free_steps: int | None = None
    reload_waits: bool = False
    max_model_len: int = 512
    num_blocks: int = 1000
    tokenizer_path: str = ""
    default_sampling: dict[str, float] = {}


@dataclass
class Request:
    submit: Submit
    produced: int
    started: bool = False

    def next_token(self) -> int:
        text = [token for token in self.submit.prompt if token < 256] or [65]
        if self.produced >= len(text) and not self.submit.sampling.ignore_eos:
            return EOS
        return text[self.produced % len(text)]


class EchoEngine:
    def __init__(self, run_dir: Path, behaviour: Behaviour) -> None:
        self.run_dir = run_dir
        self.behaviour = behaviour
        self.start = start_of(run_dir, behaviour)
        self.running: dict[str, Request] = {}
        self.paused = self.held = False
        self.pausing: list[Pause] = []
        self.pause_reply: int | None = None
        self.generation = 1
        self.steps = 0
        self.received = (run_dir.parent / "received.jsonl").open("ab", buffering=0)
        self.blackbox = BlackBox(0, run_dir)
        self.blackbox.open()
        self.context = zmq.Context()
        self.source = self.context.socket(zmq.PULL)
        self.source.connect(f"ipc://{run_dir}/to_rank0")
        self.sink = self.context.socket(zmq.PUSH)
        self.sink.connect(f"ipc://{run_dir}/from_rank0")
        self.decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: ToFront) -> None:
        self.sink.send(msgspec.msgpack.encode(message))

    def info(self) -> EngineInfo:
        return EngineInfo(
            model_path=self.behaviour.tokenizer_path,
            tokenizer_path=self.behaviour.tokenizer_path,
            model_type="llama",
            architectures=("LlamaForCausalLM",),
            vocab_size=VOCAB_SIZE,
            max_model_len=self.behaviour.max_model_len,
            eos_token_ids=(EOS,),
            bos_token_id=256,
            dtype="float32",
            device="cpu",
            tensor_parallel_size=1,
            block_size=BLOCK_SIZE,
            num_blocks=self.behaviour.num_blocks,
            default_sampling=self.behaviour.default_sampling,
        )

    def run(self) -> None:
        self.send(Starting(phase="load", detail="weights"))
        if self.start == "failed":
            self.send(Failed(rank=0, message="the weights are damaged; download them again", exit_code=3))
            raise SystemExit(3)
        if self.start != "never":
            self.send(Ready(info=self.info()))
        if self.start == "unstable":
            self.source.close()
            self.sink.close()  # once all is sent
            self.context.term()
            raise SystemExit(5)
        while True:
            idle = None if self.paused or not self.running else 0
            while self.source.poll(idle):
                frame = self.source.recv()
                message = self.decoder.decode(frame)
                self.received.write(msgspec.json.encode(message) + b"\n")
                if isinstance(message, Stop):
                    (self.run_dir / "rank0.left").touch()
                    return
                self.take(message)
                idle = 0
            if not self.paused:
                self.step()

    def take(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self.running[message.request_id] = Request(message, len(message.generated))
            case Abort():
                self.end([message.request_id])
            case Pause() if message.mode == "wait" and self.running:
                self.pausing.append(message)
            case Pause():
                self.held = message.mode == "keep"
                if not self.held:
                    self.end(list(self.running))
                self.paused = True
                self.send(CallReply(call=message.call, body={"success": True, "message": "paused"}))
            case Continue():
                self.paused = self.held = False
                self.send(CallReply(call=message.call, body={"success": True, "message": "goes on"}))
            case FlushCache():
                self.send(CallReply(call=message.call, body={"success": True, "message": "flushed"}))
            case Ping():
                self.send(Pong(rank=0))
            case WatchCache():
                self.send(CacheSnapshot(watch=message.watch, stored=[]))
            case StartProfile() | StopProfile():
                self.send(CallReply(call=message.call, body={"success": True, "message": "profiled"}))
            case Reload():
                self.reload(message)

    def step(self) -> None:
        if not self.running:
            return
        if self.steps == self.behaviour.free_steps and not self.may_go():
            time.sleep(0.01)
            return
        self.steps += 1
        admitted = [name for name, request in self.running.items() if not request.started]
        self.blackbox.runs(admitted)
        self.send(Admitted(request_ids=admitted))
        for request in self.running.values():
            request.started = True
        time.sleep(self.behaviour.step_seconds)
        prompts = [request.submit.prompt for request in self.running.values()]
        if any(self.behaviour.poison in prompt for prompt in prompts):
            os._exit(9)  # with `Admitted` perhaps not sent
        if any(self.behaviour.garbled in prompt for prompt in prompts):
            self.sink.send(msgspec.msgpack.encode({"type": "Outputs", "outputs": [{"token_ids": [1.5]}]}))
            time.sleep(600)
        if any(self.behaviour.broken in prompt for prompt in prompts):
            broken = [name for name, r in self.running.items() if self.behaviour.broken in r.submit.prompt]
            self.send(StepFailed(request_ids=broken, error="the forward pass failed with OSError: broken"))
            self.send(Failed(rank=0, message="rank 0 failed in a step"))
            time.sleep(600)
        outputs = [self.advance(request) for request in self.running.values()]
        for output in outputs:
            if output.finish_reason is not None:
                del self.running[output.request_id]
        self.send(Outputs(outputs=outputs, loads=self.loads()))
        if not self.running:
            for pause in self.pausing:
                self.take(pause)
            self.pausing.clear()

    def may_go(self) -> bool:
        return (self.run_dir.parent / "go").exists()

    def advance(self, request: Request) -> RequestOutput:
        token, sampling = request.next_token(), request.submit.sampling
        request.produced += 1
        stops = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, EOS)
        finish: FinishReason | None = "length" if request.produced >= sampling.max_new_tokens else None
        fields: dict[str, Any] = {"token_ids": [token], "finish_reason": finish, "cached_tokens": 2}
        if token in stops and request.produced > sampling.min_new_tokens:
            fields = {"token_ids": [], "finish_reason": "stop", "matched_stop": token}
        if sampling.logprobs is not None:
            others = [(token + step) % 256 for step in range(sampling.logprobs)]
            fields["logprobs"] = [TokenLogprobs(-0.25, others, [-0.25 - step for step in range(sampling.logprobs)])]
        return RequestOutput(request_id=request.submit.request_id, **fields)

    def end(self, request_ids: list[str]) -> None:
        known = [name for name in request_ids if self.running.pop(name, None) is not None]
        outputs = [RequestOutput(request_id=name, token_ids=[], finish_reason="abort") for name in known]
        if outputs:
            self.send(Outputs(outputs=outputs, loads=self.loads()))

    def loads(self) -> Loads:
        return Loads(
            running=len(self.running),
            used_blocks=len(self.running),
            cached_blocks=1,
            total_blocks=self.behaviour.num_blocks,
            prefix_queried_tokens=10,
            prefix_hit_tokens=4,
            paused=self.paused,
            held=self.held,
            generation=self.generation,
        )

    def reload(self, message: Reload) -> None:
        def status(state: str) -> None:
            self.send(ReloadStatus(state=state, generation=self.generation, id=message.id, by=message.by))

        status("reading")
        while self.behaviour.reload_waits and not self.may_go():
            time.sleep(0.01)
        if message.modules and "no.such" in message.modules:
            error = "no module no.such"
            body = {
                "success": False,
                "id": message.id,
                "code": "bad_request",
                "phase": "queue",
                "error": error,
            }
        else:
            status("patching")
            self.generation += 1
            body = {
                "success": True,
                "id": message.id,
                "generation": self.generation,
                "message": "reloaded",
                "seconds": {"drain": 0.0, "read": 0.01, "total": 0.02},
            }
        status("idle")
        self.send(CallReply(call=message.call, body=body))


def start_of(run_dir: Path, behaviour: Behaviour) -> str:
    """How this set of ranks is to start; its directory's name is its number."""
    number = int(run_dir.name)
    return behaviour.start if not number else behaviour.restarts[min(number, len(behaviour.restarts)) - 1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--keeper-fd", type=int)
    options = parser.parse_args()
    behaviour = msgspec.json.decode((options.run_dir.parent / "echo.json").read_bytes(), type=Behaviour)
    (options.run_dir.parent / f"rank{options.rank}.pid").write_text(str(os.getpid()))
    start = start_of(options.run_dir, behaviour)
    if start.isdigit():
        sys.exit(int(start))
    if options.rank == 0:
        EchoEngine(options.run_dir, behaviour).run()
    else:
        while not (options.run_dir / "rank0.left").exists():
            time.sleep(0.02)


if __name__ == "__main__":
    main()
