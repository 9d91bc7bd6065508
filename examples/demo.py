"""A tour of `ts reload-forward`: serve a small model, edit its forward pass, reload, break it, restart.

    make demo

Only public interfaces are used: `ts serve` and `ts reload-forward` as processes, and the OpenAI HTTP API.
The edits happen in an overlay directory that is thrown away, so the checkout stays clean.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

MODEL = "smollm2"
QUESTION = "What is the capital of France?"
GRAPHS = ("--cpu-graphs", "--cudagraph-capture-sizes", "1", "2", "--prefill-graph-max-tokens", "32")

EDITED_FILE = "ops/activation/reference.py"
"""The kernel that every MLP of the model calls, under the package tokenspeed_kernel."""

LOG_LINES = 30
"""How much of the server's log is shown when it fails."""

ORIGINAL = "    return silu(gate) * up\n"
EDITED = "    return silu(gate) * up.neg()\n"
BROKEN = "    return silu(gate) * upp\n"


class Server:
    """`ts serve` as a process; what it logs goes to a file."""

    def __init__(self, overlay: Path, log: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._overlay = overlay
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it and wait for its ready line."""
        port = self.url.rpartition(":")[2]
        command = [ts(), "serve", MODEL, "--port", port, "--max-model-len", "512", *GRAPHS]
        command += ["--allow-reload-forward", "--reload-overlay", str(self._overlay)]
        print(f"  $ ts {' '.join(command[1:])}")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        if not (ready := self._process.stdout.readline()):
            self._exit("The server did not start")
        print(f"  {ready.strip()}")

    def stop(self) -> None:
        """Stop it as Ctrl-C does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()

    def ask(self) -> str:
        """The greedy answer to `QUESTION`."""
        body = {"model": MODEL, "temperature": 0, "max_tokens": 24}
        body["messages"] = [{"role": "user", "content": QUESTION}]
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request) as response:
                answer: str = json.load(response)["choices"][0]["message"]["content"]
        except OSError as error:
            self._exit(f"The server did not answer ({error})")
        print(f"  Q: {QUESTION}\n  A: {answer!r}")
        return answer

    def reload(self) -> bool:
        """Run `ts reload-forward`; whether it succeeded."""
        print("  $ ts reload-forward")
        done = subprocess.run(
            [ts(), "reload-forward", "--url", self.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print("".join(f"  | {line}\n" for line in done.stdout.splitlines()), end="")
        print(f"  exit code {done.returncode}")
        return done.returncode == 0

    def _exit(self, reason: str) -> NoReturn:
        ending = "\n".join(self._log.read_text().splitlines()[-LOG_LINES:])
        sys.exit(f"  {reason}; its log ends with:\n{ending}")


class Overlay:
    """The edited copy of one file."""

    def __init__(self, directory: Path) -> None:
        package = importlib.util.find_spec("tokenspeed_kernel")
        assert package is not None and package.origin is not None
        self._source = (Path(package.origin).parent / EDITED_FILE).read_text()
        self._path = directory / "tokenspeed_kernel" / EDITED_FILE
        self._line = ORIGINAL

    def write(self, line: str) -> None:
        """Write the file with `line` in the place of the original one, and show the change."""
        require(self._source.count(ORIGINAL) == 1, f"{EDITED_FILE} has one line {ORIGINAL.strip()!r}")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(self._source.replace(ORIGINAL, line))
        print(f"  tokenspeed_kernel/{EDITED_FILE}\n  -{self._line}  +{line}", end="")
        self._line = line


class Stopwatch:
    """Numbers the steps and keeps how long each took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Print the title, run the block, print and keep its time."""
        print(f"\n{len(self.seconds) + 1}. {title}")
        start = time.perf_counter()
        yield
        self.seconds[title] = time.perf_counter() - start
        print(f"  [{self.seconds[title]:.2f} s]")


def main() -> None:
    """Run the tour; it ends with an error when something does not behave as it tells."""
    with tempfile.TemporaryDirectory(prefix="tokenspeed-demo-") as scratch:
        overlay = Path(scratch, "overlay")
        overlay.mkdir()
        server = Server(overlay, Path(scratch, "server.log"))
        try:
            tour(server, Overlay(overlay))
        finally:
            server.stop()


def tour(server: Server, overlay: Overlay) -> None:
    """The steps."""
    watch = Stopwatch()
    with watch.step("Start the server; the first time, this fetches the model (90 MB)"):
        server.start()
    with watch.step("Ask a question"):
        first = server.ask()
    with watch.step("Edit a kernel that live layers and captured graphs hold"):
        overlay.write(EDITED)
    with watch.step("Ask again: without a reload nothing changes"):
        require(server.ask() == first, "an edit alone changes nothing")
    with watch.step("Reload the forward pass"):
        require(server.reload(), "the reload succeeds")
    with watch.step("Ask again: the edited code answers (nonsense, since the MLPs have the wrong sign)"):
        edited = server.ask()
        require(edited != first, "the reload changes the answer")
    with watch.step("Break the kernel"):
        overlay.write(BROKEN)
    with watch.step("Reload: the error names its place, and everything is undone"):
        require(not server.reload(), "a broken edit does not reload")
    with watch.step("Ask again: the server answers as before the broken edit"):
        require(server.ask() == edited, "a failed reload changes nothing")
    with watch.step("Mend the kernel"):
        overlay.write(ORIGINAL)
    with watch.step("Reload the mended kernel"):
        require(server.reload(), "the reload succeeds")
    with watch.step("Ask again: the first answer is back"):
        require(server.ask() == first, "the mended code answers as at the start")
    with watch.step("Restart the server, as each of these edits would need without reloading"):
        server.stop()
        server.start()
    summary(watch)


def summary(watch: Stopwatch) -> None:
    """A reload beside a restart."""
    reload, restart = watch.seconds["Reload the forward pass"], list(watch.seconds.values())[-1]
    print(f"\nA reload took {reload:.2f} s, a restart {restart:.2f} s: {restart / reload:.1f} times as long.")
    print("On a GPU with a large model a restart takes minutes.")


def require(condition: bool, what: str) -> None:
    """End the demo when it does not go as it tells."""
    if not condition:
        sys.exit(f"  This is wrong: the demo expects that {what}.")


def ts() -> str:
    """The `ts` that is installed beside this interpreter."""
    found = shutil.which("ts", path=str(Path(sys.executable).parent))
    return found or sys.exit("ts is not installed beside this Python; run `make demo`")


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
