"""`ts reload-forward` against a server that answers as the gateway does."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.waiting import PATIENCE
from tokenspeed.cli.main import main

MESSAGE = "reloaded m and 0 dependent module(s), 3 object(s) patched in 0.05 s;\nwarmed in 1.2 s"

Reload = Callable[..., int]
Capture = pytest.CaptureFixture[str]


class Gateway:
    """The double; `engines` maps a worker's address to (status, body) of its reload."""

    def __init__(self) -> None:
        self.engines: dict[str, tuple[int, Any]] = {"grpc://a:1": (200, success())}
        self.silent: list[dict[str, Any]] = []
        self.refusal: tuple[int, bytes] | None = None
        self.statuses: list[dict[str, Any]] = []
        self.status_asked = threading.Event()
        self.requests: list[tuple[str, str, dict[str, list[str]], dict[str, Any], str | None]] = []
        self.url = ""

    def reload(self, body: dict[str, Any]) -> tuple[int, bytes]:
        for status in self.statuses:
            self.status_asked.clear()
            self.current = status | {"id": body["id"]}
            assert self.status_asked.wait(PATIENCE) and self.status_asked.clear() is None
            assert self.status_asked.wait(PATIENCE)  # two questions for each phase: it is to be printed once
        return self.fan_out(self.engines)

    def status(self) -> tuple[int, bytes]:
        reply = self.fan_out({"grpc://a:1": (200, getattr(self, "current", {"state": "idle", "id": None}))})
        self.status_asked.set()
        return reply

    def fan_out(self, answers: dict[str, tuple[int, Any]]) -> tuple[int, bytes]:
        results = {
            f"id-{url}": {"worker_id": f"id-{url}", "url": url, "status": code, "body": body}
            for url, (code, body) in answers.items()
        }
        failed = [
            {
                "worker_id": key,
                "url": row["url"],
                "error": "upstream_error",
                "message": f"HTTP {row['status']}",
            }
            for key, row in results.items()
            if row["status"] != 200
        ] + self.silent
        reply = {"results": results, "failed": failed, "total": len(results) + len(self.silent)}
        return 207 if failed else 200, json.dumps(reply | {"succeeded": len(results) - len(failed)}).encode()


def success(**more: Any) -> dict[str, Any]:
    return {"success": True, "message": MESSAGE, **more}


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    double = Gateway()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.record(body)
            self.answer(*(double.refusal or double.reload(body)))

        def do_GET(self) -> None:
            self.answer(*(double.refusal or double.status()))

        def record(self, body: dict[str, Any]) -> None:
            address = urlsplit(self.path)
            query = parse_qs(address.query)
            double.requests.append((self.command, address.path, query, body, self.headers["Authorization"]))

        def answer(self, code: int, content: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as double.url:
        yield double


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def reload(gateway: Gateway) -> Reload:
    return lambda *flags: main(["reload-forward", "--url", gateway.url, *flags])


def test_one_engine(gateway: Gateway, reload: Reload, capsys: Capture) -> None:
    assert reload() == 0
    assert capsys.readouterr().out == f"{MESSAGE}\n"
    ((method, path, query, body, key),) = gateway.requests
    assert (method, path, query) == (
        "POST",
        "/v1/rl/engine/reload_forward",
        {"selector": ["engine=tokenspeed"]},
    )
    assert (body["mode"], body["timeout_s"], key) == ("wait", 600.0, None)
    assert "modules" not in body


def test_flags_reach_the_engine(gateway: Gateway, reload: Reload) -> None:
    flags = ["--mode", "abort", "--modules", "a.b", "c", "--timeout", "5", "--selector", "id=x,engine=y"]
    assert reload(*flags, "--api-key", "k") == 0
    ((_, _, query, body, key),) = gateway.requests
    assert (body["mode"], body["modules"], body["timeout_s"]) == ("abort", ["a.b", "c"], 5.0)
    assert query == {"selector": ["id=x,engine=y"]}
    assert key == "Bearer k"


def test_every_call_has_an_id_of_its_own(gateway: Gateway, reload: Reload) -> None:
    reload()
    reload()
    first, second = (request[3]["id"] for request in gateway.requests)
    assert first != second


def test_what_could_not_be_reloaded_is_listed(gateway: Gateway, reload: Reload, capsys: Capture) -> None:
    extras = {
        "stale": [{"definition": "m.f", "why": "became a class", "held_by": ["x.y", "z"]}],
        "needs_restart": [
            {"what": "m.C.__init__", "why": "it ran once"},
            {"what": "a.so", "why": "it is a built library"},
            {"what": "m.D.__init__", "why": "it ran once"},
        ],
        "pending": ["p.q"],
        "notes": ["nothing was held"],
    }
    gateway.engines["grpc://a:1"] = (200, success(**extras))
    assert reload() == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "stale: m.f: became a class (held by x.y, z)",
        "needs a restart: a.so: it is a built library",
        "needs a restart: m.C.__init__, m.D.__init__: it ran once",
        "changed, but not reloaded: p.q",
        "note: nothing was held",
    ]


def test_a_failure_tells_phase_rank_and_place(gateway: Gateway, reload: Reload, capsys: Capture) -> None:
    failure = {
        "success": False,
        "code": "failed",
        "phase": "patch",
        "rank": 1,
        "error": "NameError: no name 'x'",
    }
    place = {"file": "/o/m.py", "line": 7, "text": "    x + 1\n"}
    trace = [f"/o/{number}.py:1 in f: g()" for number in range(9)]
    gateway.engines["grpc://a:1"] = (400, failure | place | {"trace": trace, "undone": True})
    assert reload() == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == [
        "not reloaded in phase patch on rank 1: NameError: no name 'x'",
        "  /o/m.py:7: x + 1",
        "  on the way:",
        *(f"    /o/{number}.py:1 in f: g()" for number in range(5, 9)),
        "undone; the old code serves on",
    ]


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        ({"code": "not_enabled", "error": "x"}, "without --allow-reload-forward; start it with that flag"),
        (
            {"code": "timeout", "phase": "drain", "error": "still 2 running"},
            "in phase drain (timeout): still 2",
        ),
        ({"code": "bad_request", "error": "no module x"}, "not reloaded (bad_request): no module x"),
        ({"message": "old engine"}, "not reloaded: old engine"),
    ],
)
def test_other_failures(
    gateway: Gateway,
    reload: Reload,
    capsys: Capture,
    failure: dict[str, Any],
    sentence: str,
) -> None:
    gateway.engines["grpc://a:1"] = (400, {"success": False, **failure})
    assert reload() == 1
    assert sentence in capsys.readouterr().err


def test_one_of_several_engines_fails(gateway: Gateway, reload: Reload, capsys: Capture) -> None:
    gateway.engines["grpc://b:1"] = (400, {"success": False, "error": "broken"})
    gateway.silent = [{"worker_id": "c", "url": "grpc://c:1", "error": "upstream_unreachable", "message": "x"}]
    assert reload() == 1
    output = capsys.readouterr()
    assert output.out == f"grpc://a:1:\n{MESSAGE}\n"
    assert output.err.splitlines() == [
        "grpc://b:1:",
        "not reloaded: broken",
        "grpc://c:1:",
        "not reloaded: the gateway cannot reach the engine's control address",
        "2 of 3 engines did not reload",
    ]


def test_json_prints_the_reply_alone(gateway: Gateway, reload: Reload, capsys: Capture) -> None:
    gateway.engines["grpc://a:1"] = (400, {"success": False, "error": "broken"})
    assert reload("--json") == 1
    output = capsys.readouterr()
    assert json.loads(output.out)["results"]["id-grpc://a:1"]["body"]["error"] == "broken"
    assert output.err == ""


def test_each_phase_is_shown_once(gateway: Gateway, reload: Reload, capsys: Capture) -> None:
    gateway.statuses = [
        {"state": "draining", "detail": "3 running", "generation": 0},
        {"state": "patching", "detail": "", "generation": 0},
    ]
    assert reload() == 0
    assert capsys.readouterr().err.splitlines() == ["draining: 3 running", "patching"]


@pytest.mark.parametrize(
    ("status", "content", "exit_code", "sentence"),
    [
        (404, b"", 1, "serves no /v1/rl; start the server with --allow-reload-forward"),
        (401, b'{"error": {"code": "invalid_api_key"}}', 2, "wants a key; give the server's with --api-key"),
        (400, b'{"error": "no_workers_match", "message": "x"}', 2, "no engine matches the selector"),
        (400, b'{"error": "invalid_selector", "message": "at byte 7"}', 2, "cannot be read: at byte 7"),
        (500, b"oops", 1, "answered 500: oops"),
        (200, b"<html>", 1, "is no TokenSpeed server"),
        (200, b"[]", 1, "is no TokenSpeed server"),
        (200, b"{}", 1, "is no TokenSpeed server"),
    ],
)
def test_the_gateway_refuses(
    gateway: Gateway,
    reload: Reload,
    capsys: Capture,
    status: int,
    content: bytes,
    exit_code: int,
    sentence: str,
) -> None:
    gateway.refusal = (status, content)
    assert reload() == exit_code
    output = capsys.readouterr().err
    assert sentence in output
    assert output.count("\n") == 1


def test_no_server(capsys: Capture) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        assert main(["reload-forward", "--url", url]) == 1
    assert f"{url} cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--url", ""], "--url '' is not a URL"),
        (["--url", "ftp://x"], "is not a URL"),
        (["--url", "http://x:99999"], "is not a URL"),
        (["--url", "http://x:abc"], "is not a URL"),
        (["--url", "http://[x"], "is not a URL"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--timeout", "nan"], "--timeout must be above 0"),
        (["--timeout", "inf"], "--timeout must be above 0"),
    ],
)
def test_flags_that_cannot_work(capsys: Capture, flags: list[str], sentence: str) -> None:
    assert main(["reload-forward", *flags]) == 2
    output = capsys.readouterr().err
    assert sentence in output
    assert output.count("\n") == 1
