"""The stack as a process: start, service, stop, and every way in which a part of it can fail."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.waiting import PATIENCE, until
from tokenspeed.gateway.stack import public_host
from tokenspeed.runtime.config import Config, ReloadOptions, ServeOptions

from .conftest import RunningStack

Start = Callable[..., RunningStack]


def reload_forward(stack: RunningStack, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenspeed.cli.main", "reload-forward", "--url", stack.url, *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_serves_and_stops(start: Start) -> None:
    stack = start("serve").until_ready()
    assert stack.ask("hello").json()["choices"][0]["message"]["content"] == "answer"
    assert len(stack.stdout.splitlines()) == 1
    assert stack.stdout.startswith("TokenSpeed is ready: stand-in at http://127.0.0.1:")
    assert stack.stdout.endswith("/metrics\n")
    assert "development only" not in stack.stderr
    stack.process.send_signal(signal.SIGTERM)
    assert stack.wait() == 0


@pytest.mark.parametrize("host", ["::1", "::", "localhost"])
def test_serves_at_every_kind_of_address(start: Start, host: str) -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    stack = start("serve", "--host", host).until_ready()
    assert stack.ask("hello").status_code == 200


def test_flags_of_the_gateway_reach_it(start: Start) -> None:
    stack = start("serve", "--cors-allowed-origins", "http://example.com").until_ready()
    reply = httpx.get(f"{stack.url}/v1/models", headers={"Origin": "http://example.com"}, timeout=PATIENCE)
    assert reply.headers["access-control-allow-origin"] == "http://example.com"


def test_a_wrong_value_for_the_gateway_is_refused_before_anything_starts(start: Start) -> None:
    stack = start("serve", "--policy", "best")
    assert stack.wait() == 2
    assert "the gateway refuses --policy: invalid choice" in stack.stderr


def test_rl_routes_are_off_without_the_flag(start: Start) -> None:
    stack = start("serve").until_ready()
    done = reload_forward(stack)
    assert done.returncode == 1
    assert done.stderr.endswith("serves no /v1/rl; start the server with --allow-reload-forward\n")


def test_reload_forward_through_the_gateway(start: Start) -> None:
    stack = start("serve", "--allow-reload-forward").until_ready()
    assert "development only" in stack.stderr
    done = reload_forward(stack)
    assert (done.returncode, done.stdout, done.stderr) == (0, "reloaded m in 0.00 s;\nwarmed\n", "")
    done = reload_forward(stack, "--selector", "engine=x")
    assert done.returncode == 2
    assert "no engine matches the selector engine=x" in done.stderr


def test_an_api_key_guards_clients_and_reloads(start: Start) -> None:
    stack = start("serve", "--allow-reload-forward", "--api-key", "k").until_ready()
    assert stack.ask("hello").status_code == 401
    assert reload_forward(stack).returncode == 2
    assert reload_forward(stack, "--api-key", "k").returncode == 0


def test_requests_held_for_long_do_not_make_the_engine_look_wedged(start: Start) -> None:
    stack = start("serve").until_ready()
    with ThreadPoolExecutor(12) as pool:
        held = [pool.submit(stack.ask, "hold") for _ in range(6)]
        stack.held(6)
        time.sleep(5)  # SMG's own bound is 3 s without a token
        held += [pool.submit(stack.ask, "hold") for _ in range(6)]
        stack.held(12)
        assert not any(request.done() for request in held)
        stack.release()
        assert {request.result().status_code for request in held} == {200}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_running_requests_finish(start: Start, signum: int) -> None:
    stack = start("serve").until_ready()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stack.ask, "hold")
        stack.held(1)
        stack.process.send_signal(signum)
        until(lambda: "stopping" in stack.stderr)
        assert not running.done()
        stack.release()
        assert running.result().json()["choices"][0]["message"]["content"] == "answer"
    assert stack.wait() == 0


def test_a_second_ctrl_c_kills(start: Start) -> None:
    stack = start("stubborn").until_ready()
    stack.process.send_signal(signal.SIGINT)
    until(lambda: "stopping" in stack.stderr)
    stack.process.send_signal(signal.SIGINT)
    assert stack.wait() == 128 + signal.SIGINT


def test_ctrl_c_while_starting(start: Start) -> None:
    stack = start("stuck", "--log-level", "debug")
    until(lambda: "the engine is starting: weights" in stack.stderr)
    stack.children()
    stack.process.send_signal(signal.SIGINT)
    assert stack.wait() == 128 + signal.SIGINT
    assert stack.stdout == ""


@pytest.mark.parametrize(
    ("behaviour", "exit_code", "sentence"),
    [
        ("fail", 3, "ts serve: the model has no weights; give one that has\n"),
        ("vanish", 1, "ts serve: the engine ended with exit code 7; see its messages above\n"),
    ],
)
def test_a_failed_start(start: Start, behaviour: str, exit_code: int, sentence: str) -> None:
    stack = start(behaviour)
    assert stack.wait() == exit_code
    assert stack.stderr.endswith(sentence)
    assert stack.stdout == ""


@pytest.mark.parametrize(("victim", "name"), [("stand_in_front", "the engine"), ("smg", "the gateway (smg)")])
def test_a_killed_child_is_reported_and_everything_ends(start: Start, victim: str, name: str) -> None:
    stack = start("serve").until_ready()
    stack.child(victim).kill()
    assert stack.wait() == 1
    assert stack.stderr.endswith(f"ts serve: {name} was killed by SIGKILL; see its messages above\n")


def test_no_orphan_when_ts_serve_itself_is_killed(start: Start) -> None:
    stack = start("serve").until_ready()
    assert {stack.child("stand_in_front").pid, stack.child("smg").pid} <= stack.children().keys()
    stack.process.kill()
    assert stack.wait() == -signal.SIGKILL


def test_nohup_outlives_its_terminal(start: Start) -> None:
    stack = start("serve", nohup=True).until_ready()
    stack.process.send_signal(signal.SIGHUP)
    assert stack.ask("hello").status_code == 200
    stack.process.send_signal(signal.SIGTERM)
    assert stack.wait() == 0


def test_a_port_in_use_is_refused_before_anything_starts(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        stack = start("serve", "--port", str(port))
        assert stack.wait() == 4
        assert stack.stderr == (f"ts serve: port {port} on 127.0.0.1 is in use; stop its user or give another --port\n")


def test_one_port_for_two_addresses_is_refused(start: Start) -> None:
    stack = start("serve", "--port", "8000", "--rl-control-port", "8000")
    assert stack.wait() == 2
    assert "--port and --rl-control-port are both 8000" in stack.stderr


def test_a_missing_overlay_is_refused(start: Start) -> None:
    stack = start("serve", "--allow-reload-forward", "--reload-overlay", "/no/such/directory")
    assert stack.wait() == 2
    assert "--reload-overlay /no/such/directory is not a directory" in stack.stderr


@pytest.mark.parametrize(
    ("serve", "allow", "host"),
    [
        (ServeOptions(), False, "0.0.0.0"),
        (ServeOptions(), True, "127.0.0.1"),
        (ServeOptions(api_key="k"), True, "0.0.0.0"),
        (ServeOptions(host="::1"), True, "::1"),
    ],
)
def test_default_address(serve: ServeOptions, allow: bool, host: str) -> None:
    assert public_host(Config(serve=serve, reload=ReloadOptions(allow_reload_forward=allow))) == host
