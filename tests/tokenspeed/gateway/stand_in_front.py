"""A front process without an engine: it speaks the status protocol and the part of gRPC that SMG asks for.

`python stand_in_front.py BEHAVIOUR MODEL_DIR --run-dir DIR --status-fd N`; it answers `answer` to everything.
A prompt with the word `hold` waits until the file DIR/release is there, and DIR/held-N tells that N of them wait.
BEHAVIOUR is one of `serve`, `fail` (reports a failure while it starts), `vanish` (ends without a word), `stuck` (never
ready), `stubborn` (serves, and ignores SIGTERM).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import uvicorn
from google.protobuf import struct_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as rpc
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tokenizers import Tokenizer


class Engine(rpc.TokenSpeedSchedulerServicer):
    def __init__(self, model: Path, run_dir: Path, control_port: int) -> None:
        self.model = model
        self.run_dir = run_dir
        self.control_port = control_port
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.running = 0
        self.held = 0

    async def Generate(self, request: Any, _context: Any) -> AsyncIterator[Any]:
        self.running += 1
        try:
            if "hold" in self.tokenizer.decode(list(request.tokenized.input_ids)):
                self.held += 1
                (self.run_dir / f"held-{self.held}").touch()
                while not (self.run_dir / "release").exists():
                    await asyncio.sleep(0.02)
            answer = self.tokenizer.encode("answer").ids
            prompt = len(request.tokenized.input_ids)
            done = {"prompt_tokens": prompt, "completion_tokens": len(answer)}
            if request.stream:
                chunk = pb.GenerateStreamChunk(token_ids=answer, **done)
                yield pb.GenerateResponse(request_id=request.request_id, chunk=chunk)
            complete = pb.GenerateComplete(output_ids=answer, finish_reason="stop", **done)
            yield pb.GenerateResponse(request_id=request.request_id, complete=complete)
        finally:
            self.running -= 1

    async def HealthCheck(self, _request: Any, _context: Any) -> Any:
        return pb.HealthCheckResponse(healthy=True)

    async def Abort(self, _request: Any, _context: Any) -> Any:
        return pb.AbortResponse(success=True)

    async def GetModelInfo(self, _request: Any, _context: Any) -> Any:
        path = str(self.model)
        return pb.GetModelInfoResponse(
            model_path=path,
            tokenizer_path=path,
            served_model_name="stand-in",
            model_type="llama",
            architectures=["LlamaForCausalLM"],
            max_context_length=8192,
            vocab_size=self.tokenizer.get_vocab_size(),
            eos_token_ids=[2],
            pad_token_id=2,
            bos_token_id=1,
        )

    async def GetServerInfo(self, _request: Any, _context: Any) -> Any:
        args = struct_pb2.Struct()
        args.update({"rl.control_url": f"http://127.0.0.1:{self.control_port}", "tp_size": 1, "dp_size": 1})
        return pb.GetServerInfoResponse(server_args=args, tokenspeed_version="0", max_total_num_tokens=10000)

    async def GetLoads(self, _request: Any, _context: Any) -> Any:
        return pb.GetLoadsResponse(dp_rank_count=1, loads=[pb.SchedulerLoad(dp_rank=0)])


def control_app() -> Starlette:
    async def reload_forward(request: Request) -> JSONResponse:
        body = json.loads(await request.body())
        return JSONResponse({"success": True, "id": body["id"], "message": "reloaded m in 0.00 s;\nwarmed"})

    async def reload_status(_: Request) -> JSONResponse:
        return JSONResponse({"state": "idle", "id": None, "generation": 0, "detail": ""})

    routes = [
        Route("/reload_forward", reload_forward, methods=["POST"]),
        Route("/reload_status", reload_status, methods=["GET"]),
    ]
    return Starlette(routes=routes)


async def serve(behaviour: str, model: Path, run_dir: Path, report: Any) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, (lambda: None) if behaviour == "stubborn" else stop.set)
    control = uvicorn.Server(uvicorn.Config(control_app(), host="127.0.0.1", port=0, log_level="warning", ws="none"))
    control.config.load()
    control.lifespan = control.config.lifespan_class(control.config)
    await control.startup()
    control_port = control.servers[0].sockets[0].getsockname()[1]
    engine = Engine(model, run_dir, control_port)
    server = grpc.aio.server()
    rpc.add_TokenSpeedSchedulerServicer_to_server(engine, server)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for name in ("", "tokenspeed.grpc.scheduler.TokenSpeedScheduler"):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    report(
        event="ready",
        grpc_port=port,
        control_url=f"http://127.0.0.1:{control_port}",
        info={"pid": os.getpid()},
    )
    (run_dir / "pid").write_text(str(os.getpid()))
    ticks = asyncio.create_task(control.main_loop())
    await stop.wait()
    while engine.running:
        await asyncio.sleep(0.02)
    await server.stop(5)
    control.should_exit = True
    await ticks
    await control.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour")
    parser.add_argument("model", type=Path)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--status-fd", type=int, required=True)
    args = parser.parse_args()
    status = os.fdopen(args.status_fd, "w", buffering=1)

    def report(**event: Any) -> None:
        print(json.dumps(event), file=status)

    assert json.loads((args.run_dir / "config.json").read_bytes())["model"]["model"] == str(args.model)
    report(event="starting", phase="weights", detail="none to load")
    if args.behaviour == "fail":
        report(event="failed", message="the model has no weights; give one that has", exit_code=3)
        return 3
    if args.behaviour == "vanish":
        return 7
    if args.behaviour == "stuck":
        signal.pause()
    asyncio.run(serve(args.behaviour, args.model, args.run_dir, report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
