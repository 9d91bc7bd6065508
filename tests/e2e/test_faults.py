"""Processes that die, and starts that cannot work: one sentence, an exit code, no orphan."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import SMALL
from tests.e2e.harness import HTTP, Server
from tests.ports import free_port
from tests.waiting import PATIENCE, until


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path) -> Iterator[Server]:
    server = Server(str(tiny_model), *SMALL, "--drain-timeout", "600", log=tmp_path / "log", port=free_port())
    yield server
    server.kill()


def find(children: list[psutil.Process], words: str) -> psutil.Process:
    """The child whose command line has `words`."""
    return next(child for child in children if words in " ".join(child.cmdline()))


def children_of(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(processes: list[psutil.Process]) -> None:
    until(lambda: not any(map(is_alive, processes)), lambda: str([p for p in processes if is_alive(p)]))


@pytest.mark.parametrize(
    ("victim", "sentence"),
    [
        ("tokenspeed.server", "the engine was killed by sigkill"),
        ("smg::router", "gateway"),
    ],
)
def test_a_killed_process_ends_the_server_with_a_sentence(server: Server, victim: str, sentence: str) -> None:
    server.start()
    children = children_of(server)
    find(children, victim).kill()
    server.process.wait(PATIENCE)
    assert server.process.returncode not in (0, None)
    assert sentence in server.output().lower(), server.output()
    assert "Traceback" not in server.output(), server.output()
    assert_gone(children)


def test_kill_9_of_ts_serve_leaves_no_orphan(server: Server) -> None:
    server.start()
    children = children_of(server)
    assert len(children) >= 3
    server.process.kill()
    server.process.wait()
    assert_gone(children)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_running_requests_finish(server: Server, how: int) -> None:
    server.start()
    children = children_of(server)
    body = {"model": server.served, "prompt": "Tell", "max_tokens": 300, "stream": True, "ignore_eos": True}
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.process.send_signal(how)
        rest = [line for line in lines if line.startswith("data: {")]
    assert json.loads(rest[-1].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(PATIENCE) == 0, server.output()
    assert_gone(children)


def serve(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenspeed.cli.main", "serve", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def check(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr + done.stdout
    last = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in last, last


def test_a_missing_model(tmp_path: Path) -> None:
    done = serve(str(tmp_path / "nowhere"), "--port", "0")
    check(done, 3, "nowhere", "does not exist")
    assert done.stderr.count("\n") == 1, "nothing was started for it"


def test_an_unsupported_architecture(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["MambaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(serve(str(tmp_path), "--port", "0"), 3, "MambaForCausalLM", "LlamaForCausalLM")


def test_a_damaged_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    check(serve(str(tmp_path), "--port", "0"), 3, "model.safetensors")


def test_too_little_kv_cache(tiny_model: Path) -> None:
    check(serve(str(tiny_model), "--port", "0", "--max-total-tokens", "64"), 4, "KV cache", "--max-total-tokens")


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
        check(serve(str(tiny_model), "--port", "0", "--rl-control-port", str(port)), 4, str(port), "in use")


def test_ranks_that_do_not_divide_the_model(tiny_model: Path) -> None:
    check(serve(str(tiny_model), "--port", "0", "--tensor-parallel-size", "3"), 2, "3")


def test_two_servers_that_start_on_one_port(server: Server, tiny_model: Path, tmp_path: Path) -> None:
    other = Server(str(tiny_model), *SMALL, log=tmp_path / "other", port=server.port)
    both = [server, other]
    for each in both:
        each.launch()
    try:
        until(lambda: any(each.process.poll() is not None for each in both))
        (first,) = [each for each in both if each.process.poll() is None]
        (second,) = [each for each in both if each is not first]
        assert second.process.returncode == 4, second.output()
        assert "TokenSpeed is ready" not in second.output()
        assert f"port {server.port} on 127.0.0.1 is in use" in second.output().splitlines()[-1]
        assert first.wait_until_ready().text("Hello")
        assert first.stop() == 0
    finally:
        other.kill()
