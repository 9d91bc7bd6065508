"""The command line for SMG, read by SMG's own parser."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from smg.launch_router import parse_router_args

from tokenspeed.errors import ResourceError
from tokenspeed.gateway.ports import Address
from tokenspeed.gateway.smg import require_smg, smg_command, smg_environment, until_served
from tokenspeed.runtime.config import Config, ReloadOptions, ServeOptions


def parsed(config: Config) -> Any:
    command = smg_command(config, Address("127.0.0.1", 8000), 9100, 29000)
    assert command[:4] == [sys.executable, "-m", "smg", "launch"]
    return parse_router_args(command[4:])


def test_one_engine_behind_the_public_address() -> None:
    args = parsed(Config())
    assert args.backend == "tokenspeed"
    assert args.worker_urls == ["grpc://127.0.0.1:9100"]
    assert (args.host, args.port) == ("127.0.0.1", 8000)
    assert (args.prometheus_host, args.prometheus_port) == ("127.0.0.1", 29000)
    assert args.policy == "passthrough"


def test_nothing_runs_twice_and_silence_is_no_fault() -> None:
    args = parsed(Config())
    assert args.disable_retries
    assert args.disable_circuit_breaker
    assert args.worker_wedge_secs > 7200
    assert args.worker_stale_secs == 0
    assert args.request_timeout_secs > 7200


@pytest.mark.parametrize(
    ("config", "enabled"),
    [
        (Config(), False),
        (Config(serve=ServeOptions(enable_rl=True)), True),
        (Config(reload=ReloadOptions(allow_reload_forward=True)), True),
    ],
)
def test_rl_routes(config: Config, enabled: bool) -> None:
    args = parsed(config)
    assert args.enable_rl == enabled
    assert not enabled or args.rl_control_timeout_secs > 600


def test_api_key() -> None:
    assert parsed(Config()).api_key is None
    assert parsed(Config(serve=ServeOptions(api_key="k"))).api_key == "k"


@pytest.mark.parametrize(("ours", "its"), [("debug", "debug"), ("info", "warn"), ("error", "error")])
def test_log_level(monkeypatch: pytest.MonkeyPatch, ours: str, its: str) -> None:
    monkeypatch.delenv("RUST_LOG", raising=False)
    config = Config(serve=ServeOptions(log_level=ours))
    assert parsed(config).log_level == its
    assert f"smg={its}" in smg_environment(config)["RUST_LOG"]


def test_a_rust_log_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUST_LOG", "trace")
    assert smg_environment(Config())["RUST_LOG"] == "trace"


def test_missing_smg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smg", None)
    with pytest.raises(ResourceError, match="pip install smg"):
        require_smg()


async def test_another_server_at_the_address_is_not_taken_for_ours() -> None:
    workers = [("grpc://127.0.0.1:1", "theirs"), ("grpc://127.0.0.1:2", "ours")]
    asked: list[str | None] = []

    class Gateway(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            if self.path == "/workers":
                asked.append(self.headers["Authorization"])
                known = workers[: len(asked)]  # ours comes later
                body = {"workers": [{"url": url, "model_id": model} for url, model in known]}
                self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None:
            """Silent."""

    with HTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            assert await until_served(Address("127.0.0.1", server.server_port), 2, "k") == "ours"
        finally:
            server.shutdown()
            thread.join()
    assert asked == ["Bearer k", "Bearer k"]
