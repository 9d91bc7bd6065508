"""The client against a server that streams by a script: what is timed, what is counted, and what fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tokenspeed.bench.client import ENDPOINTS, Backend, Client, RequestResult
from tokenspeed.bench.datasets import Sample
from tokenspeed.errors import ResourceError

Piece = bytes | float | asyncio.Event
"""What an answer is made of: bytes to send, seconds to wait, something to wait for."""

SAMPLE = Sample("Hello", 1, 8)
USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}


def completion(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def chat(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


@asynccontextmanager
async def serving(pieces: Sequence[Piece], status: int = 200) -> AsyncIterator[tuple[str, list[Any]]]:
    """A server whose every answer is `pieces`. Gives its address and the bodies."""
    bodies: list[Any] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for piece in pieces:
            match piece:
                case float():
                    await asyncio.sleep(piece)
                case asyncio.Event():
                    await piece.wait()
                case _:
                    await response.write(piece)
        return response

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "first"}, {"id": "second"}]})

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}", bodies
    finally:
        await runner.cleanup()


def events(*objects: Any) -> list[bytes]:
    return [f"data: {json.dumps(each)}\n\n".encode() for each in objects]


async def ask(
    pieces: Sequence[Piece], backend: Backend = "openai", status: int = 200, **options: Any
) -> tuple[RequestResult, Any]:
    async with serving(pieces, status) as (url, bodies), Client(url, backend, ENDPOINTS[backend], {}) as client:
        return await client.generate("m", SAMPLE, options), bodies[0]


async def test_a_completion_is_timed_by_its_texts() -> None:
    first, second, third = events(completion("a"), completion("b"), completion("c"))
    end = events(completion("", "length"), USAGE)
    pieces = [0.05, first, 0.1, second, third, *end, b"data: [DONE]\n\n"]
    result, body = await ask(pieces, temperature=0.0)
    assert result.success and result.text == "abc" and not result.error
    assert (result.prompt_len, result.output_len) == (5, 3)
    assert result.ttft >= 0.05 and len(result.itls) == 2 and result.itls[0] > 0
    assert result.latency == pytest.approx(result.ttft + sum(result.itls))
    assert body == {
        "model": "m",
        "prompt": "Hello",
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
    }


async def test_the_role_of_a_chat_is_no_token() -> None:
    role, text = events(chat({"role": "assistant", "content": ""}), chat({"content": "hi"}))
    thought, tool = events(chat({"reasoning_content": "hm"}), chat({"tool_calls": [{"index": 0}]}))
    end = events(chat({}, "stop"))
    result, body = await ask([role, 0.05, thought, text, tool, *end, b"data: [DONE]\n\n"], "openai-chat")
    assert result.ttft >= 0.05 and len(result.itls) == 2
    assert result.text == "hmhi"
    assert result.output_len == 3  # without usage, a chunk is a token
    assert body["messages"] == [{"role": "user", "content": "Hello"}]


async def test_events_may_be_cut_anywhere() -> None:
    stream = b"".join(events(completion("\N{SNOWMAN}"), completion("b"), USAGE)).replace(b"\n\n", b"\r\n\r\n")
    stream += b": a comment\n\ndata: [DONE]\n\n"
    for size in (1, 7, len(stream)):
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        result, _ = await ask(pieces)
        assert result.text == "\N{SNOWMAN}b" and result.output_len == 3, size


async def test_failures_are_told_in_the_result() -> None:
    refused, _ = await ask([b'{"error": "too long"}'], status=400)
    assert not refused.success and "400" in refused.error and "too long" in refused.error
    broken, _ = await ask([*events(completion("a")), *events({"error": {"message": "engine lost"}})])
    assert not broken.success and "engine lost" in broken.error
    garbled, _ = await ask([b"data: {nonsense\n\n"])
    assert not garbled.success and garbled.error
    for odd in ([1], {"choices": [5]}, {"choices": {}, "usage": {"tokens": 3}}):
        result, _ = await ask(events(odd))
        assert not result.success and "not that of an OpenAI-compatible server" in result.error, odd
    null, _ = await ask(events({**completion("a"), "error": None}))
    assert null.success
    empty, _ = await ask([b"data: [DONE]\n\n"])
    assert not empty.success and empty.error == "the answer is empty"
    async with Client("http://127.0.0.1:9", "openai", "/v1/completions", {}) as client:
        nobody = await client.generate("m", SAMPLE, {})
    assert not nobody.success and "Connect" in nobody.error


async def test_the_model_is_the_first_that_the_server_names() -> None:
    async with serving([]) as (url, _), Client(url, "openai", "/v1/completions", {}) as client:
        assert await client.served_model() == "first"
    async with Client("http://127.0.0.1:9", "openai", "/v1/completions", {}) as client:
        with pytest.raises(ResourceError, match="check the address"):
            await client.served_model()


async def test_a_refused_call_is_an_error() -> None:
    async with serving([b"no profiler"], status=400) as (url, bodies), Client(url, "openai", "/", {}) as client:
        with pytest.raises(ResourceError, match="refused /start_profile: no profiler"):
            await client.call("/start_profile", {"num_steps": 3})
        assert bodies == [{"num_steps": 3}]


async def test_many_requests_are_open_at_once() -> None:
    all_are_open = asyncio.Event()
    pieces = [all_are_open, *events(completion("a")), b"data: [DONE]\n\n"]
    async with serving(pieces) as (url, bodies), Client(url, "openai", "/v1/completions", {}) as client:
        tasks = [asyncio.create_task(client.generate("m", SAMPLE, {})) for _ in range(300)]
        while len(bodies) < 300:
            await asyncio.sleep(0.01)
        assert not any(task.done() for task in tasks)
        all_are_open.set()
        assert all(result.success for result in await asyncio.gather(*tasks))
