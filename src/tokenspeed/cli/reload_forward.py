"""`ts reload-forward`: make a running server execute the edited forward pass."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import uuid
from typing import Any

from tokenspeed.cli.reload_report import failure_lines, status_line, succeeded, success_lines
from tokenspeed.cli.rl_routes import EngineReply, RLRoutes, engine_replies
from tokenspeed.errors import ConfigError, RequestError

RUN_ALLOWANCE = 2 * 60 * 60.0
"""Seconds beyond --timeout for the reload itself, which --timeout does not bound."""

LONGEST_TIMEOUT = 1e8
"""Three years; sockets take no much longer one."""

POLL_INTERVAL = 0.1
"""Seconds between two questions for the phase."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.epilog = (
        "For development only: the server must run with --allow-reload-forward. A reload keeps state that a "
        "fresh start rebuilds, so benchmark a final change on a freshly started server."
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    parser.add_argument(
        "--mode",
        choices=("wait", "abort", "keep"),
        default="wait",
        help="let running requests finish, abort them, or keep them for the new code to go on with; new ones are held "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--modules",
        nargs="+",
        metavar="NAME",
        help="reload exactly these and their users (default: every changed one)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="give up when running requests have not finished by then (default: %(default)g)",
    )
    parser.add_argument(
        "--selector", default="engine=tokenspeed", help="which engines to reload (default: %(default)s)"
    )
    parser.add_argument("--api-key", help="the server's key, where it was started with one")
    parser.add_argument("--json", action="store_true", help="print only the gateway's reply, as JSON")


def run(namespace: argparse.Namespace) -> int:
    """Reload every matching engine; 0 only when each of them did."""
    if not 0 < namespace.timeout <= LONGEST_TIMEOUT:
        raise ConfigError(
            f"--timeout must be above 0 and at most {LONGEST_TIMEOUT:g} seconds, not {namespace.timeout:g}"
        )
    routes = RLRoutes(namespace.url, namespace.api_key)
    body: dict[str, Any] = {"id": str(uuid.uuid4()), "mode": namespace.mode, "timeout_s": namespace.timeout}
    if namespace.modules:
        body["modules"] = namespace.modules
    if user := os.environ.get("USER"):
        body["by"] = user
    if namespace.json:
        reply = _reload(routes, namespace, body)
        print(json.dumps(reply, indent=2))
        return _exit_code(engine_replies(reply))
    try:
        with Phases(routes, namespace.selector, body["id"]):
            reply = _reload(routes, namespace, body)
    except KeyboardInterrupt:
        print("ts reload-forward: no longer waiting; the server goes on with the reload", file=sys.stderr)
        raise
    replies = engine_replies(reply)
    _print(replies)
    return _exit_code(replies)


def _reload(routes: RLRoutes, namespace: argparse.Namespace, body: dict[str, Any]) -> dict[str, Any]:
    timeout = namespace.timeout + RUN_ALLOWANCE
    return routes.call("POST", "reload_forward", namespace.selector, body, timeout)


def _exit_code(replies: list[EngineReply]) -> int:
    return 0 if replies and all(map(succeeded, replies)) else 1


def _print(replies: list[EngineReply]) -> None:
    for reply in replies:
        stream = sys.stdout if succeeded(reply) else sys.stderr
        if len(replies) > 1:
            print(f"{reply.worker}:", file=stream)
        for line in success_lines(reply.body) if succeeded(reply) else failure_lines(reply):
            print(line, file=stream)
    failed = sum(not succeeded(reply) for reply in replies)
    if failed and len(replies) > 1:
        print(f"{failed} of {len(replies)} engines did not reload", file=sys.stderr)


class Phases:
    """While it is entered, a thread prints each change of the state of the reload `operation` on stderr."""

    def __init__(self, routes: RLRoutes, selector: str, operation: str) -> None:
        self._routes = routes
        self._selector = selector
        self._operation = operation
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="phases", daemon=True)
        self._shown: dict[str, str] = {}

    def __enter__(self) -> Phases:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(POLL_INTERVAL)

    def _watch(self) -> None:
        while not self._done.wait(POLL_INTERVAL):
            try:
                reply = self._routes.call("GET", "reload_status", self._selector, None, 5.0)
            except (ConfigError, RequestError):
                return  # the call itself tells what is wrong
            if not self._done.is_set():
                self._show(engine_replies(reply))

    def _show(self, replies: list[EngineReply]) -> None:
        for reply in replies:
            if reply.body.get("id") != self._operation or "state" not in reply.body:
                continue
            line = status_line(reply.body)
            if self._shown.get(reply.worker) != line:
                self._shown[reply.worker] = line
                label = f"{reply.worker}: " if len(replies) > 1 else ""
                print(f"{label}{line}", file=sys.stderr, flush=True)
