"""A running server for the end-to-end tests: the real processes, the real gateway, edits in an overlay."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

import tokenspeed
import tokenspeed_kernel
from tests.waiting import PATIENCE, until

ROOTS = {"tokenspeed": Path(tokenspeed.__file__).parent, "tokenspeed_kernel": Path(tokenspeed_kernel.__file__).parent}
READY = re.compile(r"^TokenSpeed is ready: .* at (http://\S+), metrics at (http://\S+)/metrics\n", re.MULTILINE)
LAST_FRAME = "in _run_module_as_main\n"
"""How the stacks of a `python -m` end: the main thread comes last, and its first call."""


HTTP = httpx.Client(
    verify=False,
    timeout=PATIENCE,
    limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
)
"""For all calls: a client of its own would cost each of them ten times its time, mostly for certificates. No connection
is used twice, since a server may close it at that moment."""

RUNNING: list[Server] = []
"""The servers whose process may still run."""


class Server:
    """`ts serve` as a process, with an overlay that `edit` writes to. Port 0 lets the server choose one."""

    def __init__(self, model: str, *flags: str, overlay: Path | None = None, log: Path, port: int = 0):
        self.model = model
        self.flags = flags
        self.overlay = overlay
        self.log = log
        self.port = port
        self.url = ""
        """Public address, once it is ready."""
        self.control_url = ""
        """Control address of the engine, once it is ready."""

    def start(self) -> Server:
        """Start and wait until the ready line is there; an early end fails with the log."""
        self.launch()
        return self.wait_until_ready()

    def wait_until_ready(self) -> Server:
        """Wait for the ready line of a server that was launched."""

        def ended_or_ready() -> bool:
            return self.process.poll() is not None or READY.search(self.output()) is not None

        until(ended_or_ready, lambda: f"the server is not ready:\n{self.stacks()}")
        found = READY.search(self.output())
        assert found is not None, f"the server ended with {self.process.returncode}:\n{self.output()}"
        self.url, self.control_url = found.groups()
        return self

    def launch(self) -> None:
        """Start the process without waiting."""
        command = [sys.executable, "-m", "tokenspeed.cli.main", "serve", self.model]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        if self.overlay is not None:
            self.overlay.mkdir(parents=True, exist_ok=True)
            command += ["--allow-reload-forward", "--reload-overlay", str(self.overlay)]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, *self.flags], stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        RUNNING.append(self)

    def output(self) -> str:
        """What the server printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def stop(self, with_signal: int = signal.SIGTERM) -> int:
        """Stop and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(with_signal)
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired as error:
                stacks = self.stacks()
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
                raise AssertionError(f"the server does not stop:\n{stacks}") from error
        return self.process.returncode

    def kill(self) -> None:
        """End whatever is left of it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stacks(self) -> str:
        """The log after the front and the ranks wrote there where each of their threads is."""
        for pid, line in self.processes().items():
            if "tokenspeed.rank" in line or "tokenspeed.server" in line:
                self._write_stack(pid)
        return self.output()

    def _write_stack(self, pid: int) -> None:
        """Have one process write its stacks to the end, so that those of two do not get between each other.

        One that does not answer, because it is stopped, is left out.
        """
        before = len(self.output())
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + 30
        while LAST_FRAME not in self.output()[before:] and time.monotonic() < deadline:
            time.sleep(0.05)

    # ---- edits ----

    def edit(self, module: str, change: Callable[[str], str]) -> Path:
        """Apply `change` to the module's source as it is in the overlay (or installed), writing the overlay."""
        assert self.overlay is not None
        path = self.overlay_path(module)
        source = path if path.exists() else installed_path(module)
        text = source.read_text()
        edited = change(text)
        assert edited != text, f"the edit of {module} changed nothing"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(edited)
        return path

    def replace(self, module: str, old: str, new: str) -> Path:
        """Edit by replacing `old`, which must be there."""
        return self.edit(module, lambda text: text.replace(old, new))

    def revert(self, module: str) -> None:
        """Bring the module's text in the overlay back to the installed one."""
        path = self.overlay_path(module)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(installed_path(module), path)

    def restore(self) -> None:
        """Bring all code back to the installed one, whatever a test has left behind."""
        assert self.overlay is not None
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        until(lambda: self.control("GET", "/health").status_code == 200, self.stacks)
        assert self.control("POST", "/continue_generation").status_code == 200
        for path in self.overlay.rglob("*.py"):
            path.unlink()
        reply = self.reload()
        assert reply["success"], dump(reply)
        assert self.reload()["modules"] == []

    def overlay_path(self, module: str) -> Path:
        """Where the overlay keeps the module."""
        assert self.overlay is not None
        package, *_ = module.split(".")
        installed = installed_path(module)
        return self.overlay / package / installed.relative_to(ROOTS[package])

    # ---- calls ----

    def reload(self, **body: Any) -> dict[str, Any]:
        """`POST /reload_forward` at the control address with a fresh id."""
        body.setdefault("id", uuid.uuid4().hex)
        reply = HTTP.post(f"{self.control_url}/reload_forward", json=body, timeout=PATIENCE)
        parsed: dict[str, Any] = reply.json()
        assert reply.status_code == (200 if parsed["success"] else 400), reply.text
        return parsed

    def control(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Any other control call."""
        return HTTP.request(method, f"{self.control_url}{path}", json=body, timeout=PATIENCE)

    def complete(self, prompt: str | list[int], **options: Any) -> dict[str, Any]:
        """One greedy completion through the gateway."""
        body = {"model": self.served, "prompt": prompt, "max_tokens": 16, "temperature": 0, **options}
        reply = HTTP.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE)
        assert reply.status_code == 200, reply.text
        parsed: dict[str, Any] = reply.json()
        return parsed

    @contextmanager
    def busy(self, requests: int = 6) -> Iterator[list[dict[str, Any]]]:
        """Keep long requests running within the block; the list has their answers after it."""
        body = {"model": self.served, "prompt": "Tell me", "max_tokens": 500, "temperature": 0, "ignore_eos": True}
        answers: list[dict[str, Any]] = []

        def ask() -> None:
            reply = HTTP.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE)
            assert reply.status_code == 200, reply.text
            answers.append(reply.json()["choices"][0])

        threads = [threading.Thread(target=ask) for _ in range(requests)]
        for thread in threads:
            thread.start()
        self.wait_for_running(requests)
        try:
            yield answers
        finally:
            for thread in threads:
                thread.join()
        assert len(answers) == requests

    def text(self, prompt: str, **options: Any) -> str:
        """The text of one greedy completion."""
        text: str = self.complete(prompt, **options)["choices"][0]["text"]
        return text

    @property
    def served(self) -> str:
        """Name under which the gateway serves the model."""
        reply = HTTP.get(f"{self.url}/v1/models", timeout=PATIENCE).json()
        name: str = reply["data"][0]["id"]
        return name

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        lines = HTTP.get(f"{self.control_url}/metrics", timeout=PATIENCE).text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        assert values, f"no metric {name}"
        return sum(values)

    def reload_status(self) -> dict[str, Any]:
        """Where a reload stands, and the generation that serves."""
        status: dict[str, Any] = self.control("GET", "/reload_status").json()
        return status

    def wait_for_running(self, requests: int = 1) -> None:
        """Return once so many requests run."""
        until(lambda: self.metric("vllm:num_requests_running") >= requests)

    def blocks_in_use(self) -> float:
        """Share of the KV blocks that requests hold, once nothing runs any more.

        A request that its client has left may come and go in the meantime, so that only blocks that stay count.
        """
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        deadline = time.monotonic() + PATIENCE
        while any(map(self.metric, names)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.metric("vllm:kv_cache_usage_perc")

    def processes(self) -> dict[int, str]:
        """Command lines of the server's descendants by process id."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                found[child.pid] = " ".join(child.cmdline())
        return found


def installed_path(module: str) -> Path:
    """Source file of an installed module."""
    package, *rest = module.split(".")
    path = ROOTS[package].joinpath(*rest)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def dump(value: Any) -> str:
    """Readable form for assertion messages."""
    return json.dumps(value, indent=1)
