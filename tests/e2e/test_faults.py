"""Processes that die, and starts that cannot work: one sentence, an exit code, no orphan."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.conftest import SMALL
from tests.e2e.harness import Server


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path) -> Server:
    return Server(str(tiny_model), *SMALL, log=tmp_path / "log")


def find(server: Server, words: str) -> int:
    """Process id of the server's child whose command line has `words`."""
    return next(pid for pid, line in server.processes().items() if words in line)


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline, [psutil.Process(pid).cmdline() for pid in pids if psutil.pid_exists(pid)]
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("victim", "sentence"),
    [
        ("tokenspeed.server", "the engine was killed by sigkill"),
        ("smg", "gateway"),
    ],
)
def test_a_killed_process_ends_the_server_with_a_sentence(server: Server, victim: str, sentence: str) -> None:
    server.start()
    pids = list(server.processes())
    os.kill(find(server, victim), signal.SIGKILL)
    server.process.wait(60)
    assert server.process.returncode not in (0, None)
    assert sentence in server.output().lower(), server.output()
    assert "Traceback" not in server.output(), server.output()
    assert_gone(pids)


def test_kill_9_of_ts_serve_leaves_no_orphan(server: Server) -> None:
    server.start()
    pids = list(server.processes())
    assert len(pids) >= 3
    server.process.kill()
    server.process.wait()
    assert_gone(pids)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_running_requests_finish(server: Server, how: int) -> None:
    server.start()
    pids = list(server.processes())
    body = {"model": server.served, "prompt": "Tell", "max_tokens": 300, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.process.send_signal(how)
        rest = [line for line in lines if line.startswith("data: {")]
    assert json.loads(rest[-1].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(60) == 0, server.output()
    assert_gone(pids)


def serve(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenspeed.cli.main", "serve", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def check(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr + done.stdout
    last = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in last, last


def test_a_missing_model(tmp_path: Path) -> None:
    done = serve(str(tmp_path / "nowhere"), "--port", "18123")
    check(done, 3, "nowhere", "does not exist")
    assert done.stderr.count("\n") == 1, "nothing was started for it"


def test_an_unsupported_architecture(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["MambaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(serve(str(tmp_path), "--port", "18123"), 3, "MambaForCausalLM", "LlamaForCausalLM")


def test_a_damaged_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    check(serve(str(tmp_path), "--port", "18123"), 3, "model.safetensors")


def test_too_little_kv_cache(tiny_model: Path) -> None:
    check(serve(str(tiny_model), "--port", "18123", "--max-total-tokens", "64"), 4, "KV cache", "--max-total-tokens")


def test_a_port_in_use(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check(serve(str(tiny_model), "--host", "127.0.0.1", "--port", str(port)), 4, str(port), "in use")


def test_a_control_port_in_use(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check(serve(str(tiny_model), "--port", "18123", "--rl-control-port", str(port)), 4, str(port), "in use")


def test_ranks_that_do_not_divide_the_model(tiny_model: Path) -> None:
    check(serve(str(tiny_model), "--port", "18123", "--tensor-parallel-size", "3"), 2, "3")


def test_two_servers_that_start_on_one_port(server: Server, tiny_model: Path, tmp_path: Path) -> None:
    other = Server(str(tiny_model), *SMALL, log=tmp_path / "other")
    other.port = server.port
    both = [server, other]
    for each in both:
        each.launch()
    while all(each.process.poll() is None for each in both):
        time.sleep(0.1)
    (first,) = [each for each in both if each.process.poll() is None]
    (second,) = [each for each in both if each is not first]
    assert second.process.returncode == 4, second.output()
    assert "TokenSpeed is ready" not in second.output()
    assert f"port {server.port} on 127.0.0.1 is in use" in second.output().splitlines()[-1]
    while "TokenSpeed is ready" not in first.output():
        assert first.process.poll() is None, first.output()
        time.sleep(0.1)
    assert first.text("Hello")
    assert first.stop() == 0
