"""A real server without the gateway: the front and its rank as processes, asked over gRPC and HTTP."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as rpc

from tokenspeed.runtime.config import Config

PATIENCE = 600.0
"""Seconds after which a call that is not answered fails a test."""


class Server:
    """A front with its rank. Edits go to `overlay`."""

    def __init__(self, config: Config, run_dir: Path, overlay: Path) -> None:
        self.config = config
        self.run_dir = run_dir
        self.overlay = overlay

    def start(self) -> Server:
        """Start both, and wait until they serve; an early end fails with what they said."""
        self.run_dir.mkdir()
        self.overlay.mkdir()
        (self.run_dir / "config.json").write_bytes(msgspec.json.encode(self.config))
        read_fd, write_fd = os.pipe()
        root = str(Path(__file__).parents[2])
        paths = os.pathsep.join([root, *filter(None, sys.path)])
        command = [sys.executable, "-m", "tokenspeed.server", "--run-dir", str(self.run_dir)]
        with (self.run_dir / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--status-fd", str(write_fd)],
                pass_fds=[write_fd],
                stdout=log,
                stderr=log,
                process_group=0,
                env={**os.environ, "PYTHONPATH": paths},
            )
        os.close(write_fd)
        self.status = os.fdopen(read_fd)
        for line in self.status:
            event = json.loads(line)
            if event["event"] == "ready":
                self.control_url, self.info = event["control_url"], event["info"]
                self.channel = grpc.insecure_channel(f"127.0.0.1:{event['grpc_port']}")
                self.scheduler = rpc.TokenSpeedSchedulerStub(self.channel)
                return self
        raise AssertionError(f"the server did not start:\n{self.log()}")

    def log(self) -> str:
        """What front and rank said."""
        return (self.run_dir / "log").read_text(errors="replace")

    def stop(self) -> int:
        """End both, and return the exit code of the front."""
        self.channel.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the front at once, and with it the rank."""
        self.process.kill()
        self.process.wait()
        self.status.close()

    def begin(self, name: str, prompt: Sequence[int], **fields: Any) -> Any:
        """Send a request, and return its stream of responses."""
        logprobs = {key: fields.pop(key) for key in ("return_logprob", "top_logprobs_num") if key in fields}
        request = pb.GenerateRequest(
            request_id=name,
            tokenized=pb.TokenizedInput(input_ids=list(prompt)),
            sampling_params=pb.SamplingParams(**fields),
            stream=True,
            **logprobs,
        )
        return self.scheduler.Generate(request, timeout=PATIENCE)

    def generate(self, name: str, prompt: Sequence[int], **fields: Any) -> Any:
        """The completion of a request."""
        return finish(self.begin(name, prompt, **fields))

    def abort(self, name: str) -> None:
        """End a request."""
        self.scheduler.Abort(pb.AbortRequest(request_id=name), timeout=PATIENCE)

    def control(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Answer to a POST at the control address."""
        answer: dict[str, Any] = httpx.post(f"{self.control_url}{path}", json=body or {}, timeout=PATIENCE).json()
        return answer

    def counter(self, name: str) -> float:
        """A number of /metrics."""
        text = httpx.get(f"{self.control_url}/metrics", timeout=PATIENCE).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.split("{")[0].endswith(name))

    def edit(self, module: str, old: str, new: str) -> None:
        """Put an edited copy of the module's file into the overlay."""
        source = Path(str(importlib.import_module(module).__file__))
        target = self.overlay.joinpath(*source.parts[-len(module.split(".")) :])
        text = source.read_text()
        assert old in text
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text.replace(old, new))

    def restore(self) -> None:
        """Take the edits back."""
        for path in self.overlay.rglob("*.py"):
            path.unlink()


def finish(stream: Any) -> Any:
    """Read a stream of responses to its end, and return the completion."""
    *_, last = stream
    assert last.WhichOneof("response") == "complete"
    return last.complete
