"""SMG, the gateway: its command line, and how to see that it serves."""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from tokenspeed.errors import ResourceError
from tokenspeed.gateway.child import Child
from tokenspeed.gateway.ports import LOOPBACK, Address
from tokenspeed.gateway.smg_flags import LAUNCH
from tokenspeed.runtime.config import Config

DAY = 24 * 60 * 60
CONTROL_TIMEOUT = 2 * 60 * 60
"""Seconds of one control call: far above the 600 that a reload may wait for its drain before it begins."""

LOG_LEVELS = {"debug": "debug", "info": "warn", "warning": "warn", "error": "error"}
"""Our level to SMG's, whose `info` is a line for every request."""

SMG_QUIET_TARGETS = {
    "smg::posture": "error",
    "smg::routers::grpc::multimodal": "error",
    "smg::routers::grpc::common::stages::request_execution": "error",
    "smg::routers::common::placement": "error",
    "smg::response": "error",
    # Its errors are the refusals that the client gets; what fails in the engine, the engine tells.
    "smg::routers::grpc::pipeline": "off",
}
"""Parts of SMG that speak at every start, or for every mistake of a client, and the level at which they may."""

ANSI_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def require_smg() -> None:
    """Refuse early where SMG is not installed.

    Raises:
        ResourceError: with the command that installs it.
    """
    if importlib.util.find_spec("smg") is None:
        raise ResourceError("the gateway (smg) is not installed; run `pip install smg`")


def smg_command(
    config: Config, address: Address, grpc_port: int, metrics_port: int, own_flags: Sequence[str] = ()
) -> list[str]:
    """The command that serves `address` in front of the engine at `grpc_port`; `own_flags` are SMG's, from the user."""
    command = [*LAUNCH]
    command += ["--backend", "tokenspeed", "--worker-urls", worker_url(grpc_port)]
    command += ["--host", address.host, "--port", str(address.port)]
    command += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics_port)]
    command += ["--policy", "passthrough"]
    # A request that the engine aborted must not run a second time.
    command += ["--disable-retries", "--disable-circuit-breaker"]
    # While a reload or a pause holds requests, a healthy engine is silent for as long as it takes.
    command += ["--worker-wedge-secs", str(DAY), "--worker-stale-secs", "0", "--worker-stall-secs", str(DAY)]
    command += ["--disable-worker-overload-protection", "--request-timeout-secs", str(DAY)]
    # While ranks are replaced, the engine says that it is not healthy and holds requests; SMG would refuse them.
    command += ["--health-failure-threshold", str(DAY)]
    command += ["--worker-startup-check-interval", "1"]
    # The engine drains before SMG is stopped; SMG keeps taking requests for half of this time.
    command += ["--shutdown-grace-period-secs", "1"]
    command += ["--log-level", LOG_LEVELS[config.serve.log_level]]
    if config.serve.enable_rl or config.reload.allow_reload_forward:
        command += ["--enable-rl", "--rl-control-timeout-secs", str(CONTROL_TIMEOUT)]
    if config.serve.api_key is not None:
        command += ["--api-key", config.serve.api_key]
    return [*command, *own_flags]


def smg_environment(config: Config) -> dict[str, str]:
    """What SMG gets besides our own environment; a RUST_LOG of the user's own stays."""
    level = LOG_LEVELS[config.serve.log_level]
    quiet = {} if level == "debug" else SMG_QUIET_TARGETS
    targets = ",".join(f"{target}={least}" for target, least in {"smg": level, **quiet}.items())
    return {"RUST_LOG": os.environ.get("RUST_LOG", f"warn,{targets}")}


@asynccontextmanager
async def started_smg(command: Sequence[str], environment: dict[str, str]) -> AsyncIterator[Child]:
    """Start SMG and show what it prints on stderr; nothing of it is left afterwards."""
    child = await Child.start("the gateway (smg)", command, stdout=asyncio.subprocess.PIPE, environment=environment)
    relay = asyncio.create_task(_relay(child.output))
    try:
        yield child
    finally:
        await child.kill()
        await relay


async def until_served(address: Address, grpc_port: int, api_key: str | None) -> str:
    """Wait until SMG is ready and knows the engine at `grpc_port`; the name under which it serves the model."""
    while (model := await asyncio.to_thread(_served_model, address, worker_url(grpc_port), api_key)) is None:
        await asyncio.sleep(0.05)
    return model


def worker_url(grpc_port: int) -> str:
    """The engine as SMG names it."""
    return f"grpc://{LOOPBACK}:{grpc_port}"


def _served_model(address: Address, worker: str, api_key: str | None) -> str | None:
    """The model's name; None as long as SMG is not ready, or as it is another server that answers there."""
    with suppress(OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        status, _ = _get(address, "/readiness", api_key)
        if status == http.client.OK:
            _, body = _get(address, "/workers", api_key)
            models = {known["url"]: known["model_id"] for known in json.loads(body)["workers"]}
            return str(models[worker])
    return None


def _get(address: Address, path: str, api_key: str | None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address.reachable, address.port, timeout=2)
    try:
        connection.request("GET", path, headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


async def _relay(output: asyncio.StreamReader) -> None:
    """Pass SMG's lines on to stderr, without the picture that it draws in Braille at its start."""
    rest = b""
    while chunk := await output.read(65536):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            text = text if sys.stderr.isatty() else ANSI_STYLE.sub("", text)
            if text.strip() and not any("\u2800" <= character <= "\u28ff" for character in text):
                print(f"smg: {text}", file=sys.stderr, flush=True)
