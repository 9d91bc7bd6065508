"""One request to an OpenAI-compatible server, timed as its tokens come."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

from tokenspeed.bench.datasets import Sample
from tokenspeed.errors import ResourceError

Backend = Literal["openai", "vllm", "openai-chat"]

ENDPOINTS: Mapping[Backend, str] = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
"""Where each backend's requests go unless --endpoint says otherwise."""

LONGEST_REQUEST_S = 6 * 60 * 60

PARTS = ("content", "reasoning_content", "tool_calls")
"""What a chunk of a chat may bring."""


@dataclass
class RequestResult:
    """What one request brought; times are seconds, points in time those of `time.perf_counter`."""

    started: float = 0.0
    success: bool = False
    prompt_len: int = 0
    output_len: int = 0
    """Tokens of the answer, by the server's own count."""
    ttft: float = 0.0
    """From the request to the first text."""
    itls: list[float] = field(default_factory=list)
    """Between texts."""
    latency: float = 0.0
    """From the request to the last text."""
    text: str = ""
    error: str = ""


class Client:
    """Sends requests of one kind to one server."""

    def __init__(self, base_url: str, backend: Backend, endpoint: str, headers: Mapping[str, str]) -> None:
        self.base_url = base_url
        self._chat = backend == "openai-chat"
        self._endpoint = endpoint
        self._headers = headers

    async def __aenter__(self) -> Client:
        # No limit of connections: the benchmark alone decides how many requests are open.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=LONGEST_REQUEST_S),
            headers=self._headers,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def served_model(self) -> str:
        """The first model that the server names.

        Raises:
            ResourceError: when there is no such server.
        """
        try:
            async with self._session.get(f"{self.base_url}/v1/models") as reply:
                reply.raise_for_status()
                return str((await reply.json())["data"][0]["id"])
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            raise ResourceError(
                f"{self.base_url} does not tell its models ({_reason(error)}); check the address"
            ) from error

    async def call(self, path: str, body: Mapping[str, Any]) -> None:
        """A POST of which only its failure matters.

        Raises:
            ResourceError: when the server refuses it.
        """
        try:
            async with self._session.post(f"{self.base_url}{path}", json=dict(body)) as reply:
                if not reply.ok:
                    raise ResourceError(f"the server refused {path}: {(await reply.text()).strip()[:500]}")
        except (aiohttp.ClientError, OSError) as error:
            raise ResourceError(f"{path} failed: {_reason(error)}") from error

    async def generate(self, model: str, sample: Sample, options: Mapping[str, Any]) -> RequestResult:
        """Send `sample` and read its answer; a failure is told in the result."""
        body = {
            "model": model,
            "max_tokens": sample.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        if self._chat:
            body["messages"] = [{"role": "user", "content": sample.prompt}]
        else:
            body["prompt"] = sample.prompt
        result = RequestResult(prompt_len=sample.prompt_len, started=time.perf_counter())
        try:
            async with self._session.post(f"{self.base_url}{self._endpoint}", json=body) as reply:
                if not reply.ok:
                    result.error = f"{reply.status} {reply.reason}: {(await reply.text()).strip()[:500]}"
                    return result
                await self._read(reply, result)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            result.error = _reason(error)
        except (LookupError, TypeError, AttributeError) as error:
            result.error = f"the answer is not that of an OpenAI-compatible server ({_reason(error)})"
        return result

    async def _read(self, reply: aiohttp.ClientResponse, result: RequestResult) -> None:
        latest, chunks = result.started, 0
        async for event in _events(reply):
            if error := event.get("error"):
                result.error = str(error)[:500]
                return
            if usage := event.get("usage"):
                result.output_len = usage["completion_tokens"]
                result.prompt_len = usage["prompt_tokens"]
            text = self._text(event)
            if text is None:
                continue
            now = time.perf_counter()
            if chunks:
                result.itls.append(now - latest)
            else:
                result.ttft = now - result.started
            latest, chunks = now, chunks + 1
            result.text += text
        # Where a server does not count, a chunk is a token.
        result.output_len = result.output_len or chunks
        result.latency = latest - result.started
        result.success = chunks > 0
        result.error = "" if chunks else "the answer is empty"

    def _text(self, event: Mapping[str, Any]) -> str | None:
        """The text of one chunk; None for one that brings nothing, such as the role or the reason of the end."""
        choices = event.get("choices")
        if not choices:
            return None
        if not self._chat:
            return choices[0].get("text") or None
        delta = choices[0].get("delta") or {}
        if not any(delta.get(part) for part in PARTS):
            return None
        return str(delta.get("content") or delta.get("reasoning_content") or "")


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to `[DONE]`."""
    rest = b""
    async for piece in reply.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if data and line.startswith(b"data:"):
                yield msgspec.json.decode(data)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
