"""The gateway's /v1/rl routes as a client: one call to every engine that a selector matches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from tokenspeed.errors import ConfigError, RequestError

OK, MULTI_STATUS, UNAUTHORIZED, FORBIDDEN, NOT_FOUND = 200, 207, 401, 403, 404


@dataclass(frozen=True)
class EngineReply:
    """What one engine answered, or why there is no answer."""

    worker: str
    """Address of the worker, as the gateway knows it."""
    body: dict[str, Any]
    """The engine's JSON; empty when it did not answer."""
    error: str = ""
    """Why there is no answer."""


class RLRoutes:
    """Calls through the gateway at `url`; `api_key` is the one that `ts serve --api-key` was given."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._api_key = api_key

    def call(
        self, method: str, route: str, selector: str, body: dict[str, Any] | None, timeout: float
    ) -> dict[str, Any]:
        """The gateway's reply to one call of every engine that `selector` matches; `timeout` is in seconds.

        Raises:
            ConfigError: when the URL, the selector or the key is wrong.
            RequestError: when the server cannot be reached or does not serve these routes.
        """
        path = f"/v1/rl/engine/{route}?{urlencode({'selector': selector})}"
        status, text = self._request(method, path, body, timeout)
        if status in (OK, MULTI_STATUS):
            return self._parsed(text)
        raise self._refusal(status, text, selector)

    def _parsed(self, text: str) -> dict[str, Any]:
        try:
            reply = json.loads(text)
        except ValueError:
            reply = None
        if not isinstance(reply, dict) or not isinstance(reply.get("results"), dict):
            raise RequestError(f"{self.url} is no TokenSpeed server; give the address of one with --url")
        return reply

    def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> tuple[int, str]:
        mistake = ConfigError(f"--url {self.url!r} is not a URL; give one like http://127.0.0.1:8000")
        try:
            address = urlsplit(self.url)
            host, port = address.hostname, address.port
        except ValueError as error:
            raise mistake from error
        if address.scheme not in ("http", "https") or not host:
            raise mistake
        import http.client  # a third of the start-up time of --help

        secure = address.scheme == "https"
        connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        try:
            connection = connect(host, port, timeout=timeout)
            try:
                connection.request(method, address.path + path, None if body is None else json.dumps(body), headers)
                response = connection.getresponse()
                return response.status, response.read().decode(errors="replace")
            finally:
                connection.close()
        except TimeoutError as error:
            raise RequestError(f"{self.url} did not answer within {timeout:g} s") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RequestError(f"{self.url} cannot be reached ({error}); is the server running there?") from error

    def _refusal(self, status: int, text: str, selector: str) -> ConfigError | RequestError:
        try:
            reply = json.loads(text)
        except ValueError:
            reply = {}
        reason = reply.get("error") if isinstance(reply, dict) else None
        if status == NOT_FOUND:
            return RequestError(f"{self.url} serves no /v1/rl; start the server with --allow-reload-forward")
        if status in (UNAUTHORIZED, FORBIDDEN):
            return ConfigError(f"{self.url} wants a key; give the server's with --api-key")
        if reason == "no_workers_match":
            return ConfigError(f"no engine matches the selector {selector}; {self.url}/v1/rl/workers lists them")
        if reason == "invalid_selector":
            return ConfigError(f"the selector {selector} cannot be read: {reply.get('message', '')}")
        return RequestError(f"{self.url} answered {status}: {text.strip() or 'nothing'}")


def engine_replies(reply: dict[str, Any]) -> list[EngineReply]:
    """The engines' answers out of the gateway's reply: those that answered first, then the others."""
    answered = reply.get("results", {})
    replies = [
        EngineReply(envelope["url"], envelope["body"])
        if isinstance(envelope.get("body"), dict)
        else EngineReply(envelope["url"], {}, f"answered {envelope['status']}: {envelope.get('body')}")
        for envelope in answered.values()
    ]
    silent = (failure for failure in reply.get("failed", []) if failure["worker_id"] not in answered)
    return replies + [EngineReply(failure["url"], {}, _why_silent(failure)) for failure in silent]


def _why_silent(failure: dict[str, Any]) -> str:
    hints = {
        "no_control_endpoint": "the engine has told the gateway no control address",
        "upstream_unreachable": "the gateway cannot reach the engine's control address",
        "upstream_timeout": "the gateway gave up waiting; the engine may still be at it",
    }
    return hints.get(failure["error"]) or f"{failure['error']}: {failure.get('message', '')}"
