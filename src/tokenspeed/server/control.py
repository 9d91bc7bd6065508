"""The engine's own HTTP control app: reloads, pause, cache, health, info and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tokenspeed.errors import RequestError, ResourceError
from tokenspeed.runtime.config import ControlOptions
from tokenspeed.runtime.protocol.calls import Continue, DrainMode, FlushCache, Pause, StartProfile, StopProfile
from tokenspeed.runtime.protocol.refusals import NOT_ENABLED, reload_failure
from tokenspeed.server.calls import AnyCall, Body
from tokenspeed.server.client import EngineClient
from tokenspeed.server.errors import EngineUnavailable
from tokenspeed.server.metrics import Metrics
from tokenspeed.server.profiles import ProfileRequest
from tokenspeed.server.reloads import ReloadRequest, Reloads

LARGEST_BODY = 1 << 20
"""Bytes of a call's body."""

KEEP_ALIVE_S = 300
"""How long an idle connection stays open. Clients with a pool give up theirs after 15 to 90 seconds; a server that
closes first may do so just as a call is on its way, which the client then cannot send again."""

T = TypeVar("T")


class PauseRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /pause_generation`."""

    mode: DrainMode = "wait"
    """Let the running requests finish, end them with what they have, or hold them where they are."""


class ControlApp:
    """The routes. A body is read as JSON whatever its content type says, and never as anything else."""

    def __init__(
        self,
        client: EngineClient,
        reloads: Reloads,
        metrics: Metrics,
        server_info: Callable[[], Body],
        *,
        allow_reload: bool,
    ) -> None:
        self._client = client
        self._reloads = reloads
        self._metrics = metrics
        self._server_info = server_info
        self._allow_reload = allow_reload

    def build(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/reload_forward", self.reload_forward, methods=["POST"]),
                Route("/reload_status", self.reload_status, methods=["GET"]),
                Route("/pause_generation", self.pause_generation, methods=["POST"]),
                Route("/continue_generation", self.continue_generation, methods=["POST"]),
                Route("/flush_cache", self.flush_cache, methods=["GET", "POST"]),
                Route("/start_profile", self.start_profile, methods=["POST"]),
                Route("/stop_profile", self.stop_profile, methods=["POST"]),
                Route("/health", self.health, methods=["GET"]),
                Route("/server_info", self.server_info, methods=["GET"]),
                Route("/metrics", self.metrics, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _http_error, Exception: _internal_error},
        )

    async def reload_forward(self, request: Request) -> Response:
        """Run the edited forward pass, or change nothing; development only, refused without `--allow-reload-forward`.
        Answers when that is done, and once the first held request has its first token. [Reloading](reloading.md) tells
        the reply."""
        if not self._allow_reload:
            return _reply(reload_failure(None, "not_enabled", "queue", NOT_ENABLED))
        try:
            body = _decode(await _read(request), ReloadRequest)
            body.check()
        except RequestError as error:
            return _reply(reload_failure(None, "bad_request", "queue", str(error)))
        return _reply(await self._reloads.run(body))

    async def reload_status(self, _: Request) -> Response:
        """Where the current reload stands: `state` (`idle`, `queued`, `draining`, `reading`, `patching`, `warming`,
        `graphs`, `committing` or `undoing`), its `id` and who asked (`by`), the `generation` that serves, `elapsed`
        seconds since it arrived, a `detail`, and the `last` reply. It is answered while a reload runs."""
        return JSONResponse(self._reloads.status())

    async def pause_generation(self, request: Request) -> Response:
        """Hold new requests until `continue_generation`. Answers when nothing runs any more; with `keep` that is at the
        end of the step in flight, and running requests are held too. The last of several calls decides on these."""
        try:
            body = _decode(await _read(request) or b"{}", PauseRequest)
        except RequestError as error:
            return _reply(_failure("bad_request", str(error)))
        return await self._call(Pause, mode=body.mode)

    async def continue_generation(self, _: Request) -> Response:
        """End a pause, and cancel the reloads and pauses that still wait; `cancelled` tells how many."""
        return await self._call(Continue)

    async def flush_cache(self, _: Request) -> Response:
        """Forget the prefix cache: no KV computed so far is used for another request."""
        return await self._call(FlushCache)

    async def start_profile(self, request: Request) -> Response:
        """Record the steps to come on every rank with the torch profiler. The gateway has `/start_profile` as well."""
        try:
            fields = _decode(await _read(request) or b"{}", ProfileRequest).fields()
        except RequestError as error:
            return _reply(_failure("bad_request", str(error)))
        return await self._call(StartProfile, **fields)

    async def stop_profile(self, _: Request) -> Response:
        """End the profile; answers once every rank has written its files, whose names are in `files`."""
        return await self._call(StopProfile)

    async def health(self, _: Request) -> Response:
        """Whether requests are served; 503 with the reason while they are not. A reload that runs is no such reason."""
        try:
            self._client.check_health()
        except EngineUnavailable as error:
            return JSONResponse({"healthy": False, "message": str(error)}, status_code=503)
        return JSONResponse({"healthy": True, "message": ""})

    async def server_info(self, _: Request) -> Response:
        """Version, uptime, generation, the settings in use, the engine's own description with the seconds of each phase
        of its start, and its load."""
        return JSONResponse(self._server_info())

    async def metrics(self, _: Request) -> Response:
        """Metrics in Prometheus' text format; [the API page](api.md#metrics) lists them."""
        content, content_type = self._metrics.exposition()
        return Response(content, headers={"Content-Type": content_type})

    async def _call(self, kind: Callable[..., AnyCall], **fields: Any) -> Response:
        try:
            return _reply(await self._client.call(kind, **fields))
        except EngineUnavailable as error:
            return _reply(_failure("failed", str(error)))


class ControlServer:
    """The control app on its socket."""

    def __init__(self, options: ControlOptions) -> None:
        self._options = options

    def bind(self) -> str:
        """Open the socket and return its URL.

        Raises:
            ResourceError: when the address cannot be had.
        """
        host, port = self._options.rl_control_host, self._options.rl_control_port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise ResourceError(
                f"the control address {host}:{port} cannot be used ({error.strerror}); "
                "give another --rl-control-host or --rl-control-port"
            ) from error
        reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(host, host)
        if ":" in reachable and not reachable.startswith("["):
            reachable = f"[{reachable}]"
        return f"http://{reachable}:{self._socket.getsockname()[1]}"

    def start(self, app: Starlette) -> asyncio.Task[None]:
        """Answer until `stop`; the task ends early only by a fault."""
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=2,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = _QuietServer(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        return self._serving

    async def stop(self) -> None:
        """Let open calls finish for up to two seconds, then end."""
        self._server.should_exit = True
        await asyncio.wait([self._serving])


class _QuietServer(uvicorn.Server):
    """Leaves the signals to the process around it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _read(request: Request) -> bytes:
    """The body, of which never more than `LARGEST_BODY` is kept."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > LARGEST_BODY:
            raise RequestError(f"the body is larger than {LARGEST_BODY} bytes; send only the fields of this call")
    return data


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not what this call takes: {error}") from error


def _reply(body: Body) -> Response:
    return JSONResponse(body, status_code=200 if body.get("success") else 400)


def _failure(code: str, message: str) -> Body:
    return {"success": False, "code": code, "message": message, "error": message}


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "bad_request")
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(_failure(code, message), status_code=error.status_code, headers=error.headers)


async def _internal_error(request: Request, error: Exception) -> Response:
    message = f"{request.method} {request.url.path} failed: {type(error).__name__}; see the server's messages"
    return JSONResponse(_failure("failed", message), status_code=500)
