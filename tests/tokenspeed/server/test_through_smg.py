"""The front behind the real gateway, with echo ranks: what a client of the OpenAI API sees of it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.ports import free_port
from tests.waiting import PATIENCE, until
from tokenspeed.runtime.config import Config, ModelOptions, ReloadOptions, SchedulerOptions, ServeOptions

CONFIG = Config(
    model=ModelOptions(model="echo"),
    reload=ReloadOptions(allow_reload_forward=True),
    scheduler=SchedulerOptions(max_num_seqs=4, max_queued_requests=0),
    serve=ServeOptions(report_generation=True),
)
LONGEST = 100_000
"""Tokens of a prompt and its answer."""

SMG = Path(sys.executable).with_name("smg")


@pytest.fixture(scope="module")
def front(start_shared_front: Callable[..., Any]) -> Any:
    # What ignores the end of its text goes on until it is told to end.
    return start_shared_front(CONFIG, step_seconds=0.002, max_model_len=LONGEST, num_blocks=LONGEST).until_ready()


@pytest.fixture(scope="module")
def url(front: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The gateway's address."""
    with gateway(front, tmp_path_factory.mktemp("smg")) as address:
        yield address


@contextlib.contextmanager
def gateway(front: Any, folder: Path) -> Iterator[str]:
    """A gateway that runs in `folder`; its address."""
    smg = str(SMG) if SMG.exists() else shutil.which("smg")
    assert smg is not None
    port = free_port()
    flags = "--backend tokenspeed --enable-rl --disable-retries --disable-circuit-breaker --host 127.0.0.1 "
    flags += f"--port {port} --prometheus-port {free_port()} --worker-urls grpc://127.0.0.1:{front.grpc_port}"
    command = [smg, "launch", *flags.split(), "--log-level", "warn"]
    log = folder / "smg.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, process_group=0, cwd=folder)
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: serves(address) or process.poll() is not None, log.read_text)
        assert process.poll() is None, log.read_text()
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def serves(address: str) -> bool:
    try:
        return bool(httpx.get(f"{address}/v1/models", timeout=PATIENCE).json().get("data"))
    except (httpx.HTTPError, ValueError):
        return False


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, text: str, **options: Any) -> Any:
    return client.chat.completions.create(model="echo", messages=[{"role": "user", "content": text}], **options)


def test_chat_and_its_usage(client: openai.OpenAI) -> None:
    answer = chat(client, "hello world")
    assert answer.choices[0].message.content == "hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (14, 12)


def test_streamed_completions_add_up(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="echo", prompt="hello", max_tokens=4, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "hell"
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [True, False])
def test_nothing_after_a_stop_string_leaks(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {"stop": ["wor"], "stream": stream}
    if stream:
        *chunks, usage = chat(client, "hello world", stream_options={"include_usage": True}, **options)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        finish, tokens = chunks[-1].choices[0].finish_reason, usage.usage.completion_tokens
    else:
        answer = chat(client, "hello world", **options)
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
        tokens = answer.usage.completion_tokens
    assert (text, finish, tokens) == ("hello ", "stop", 9)


def test_a_client_that_goes_away_ends_the_engine_s_request(
    client: openai.OpenAI, front: Any, eventually: Callable[..., Any]
) -> None:
    before = len(front.received("Abort"))
    stream = chat(client, "hello", stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert eventually(lambda: len(front.received("Abort")) > before)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty must be between 0.01 and 100"),
        ({"extra_body": {"stop_token_ids": [5000]}}, "stop_token_ids has the token id 5000"),
        ({"extra_body": {"regex": "(a"}}, "The parenthesis is not closed"),
    ],
)
def test_what_cannot_be_served_is_a_400_with_the_sentence(
    client: openai.OpenAI, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        chat(client, "hello", **options)


@pytest.mark.parametrize("prompt", ["", "x" * (LONGEST + 1)])
def test_empty_and_over_long_prompts_are_a_400(client: openai.OpenAI, prompt: str) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="echo", prompt=prompt)


@pytest.mark.parametrize("stream", [True, False])
def test_several_answers_with_logprobs(client: openai.OpenAI, stream: bool) -> None:
    options = {"n": 3, "logprobs": True, "top_logprobs": 2, "seed": 3, "max_tokens": 4}
    texts, found = [""] * 3, [[], [], []]
    if stream:
        for chunk in chat(client, "hello", stream=True, **options):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                found[choice.index] += choice.logprobs.content if choice.logprobs else []
    else:
        answer = chat(client, "hello", **options)
        assert answer.system_fingerprint == "default"
        for choice in answer.choices:
            texts[choice.index] = choice.message.content
            found[choice.index] = choice.logprobs.content
    assert texts == ["hell"] * 3
    for content in found:
        assert [entry.token for entry in content] == list("hell")
        assert [entry.logprob for entry in content] == [-0.25] * 4
        assert [[top.logprob for top in entry.top_logprobs] for entry in content] == [[-0.25, -1.25]] * 4


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_without_likeliest_tokens(client: openai.OpenAI, stream: bool) -> None:
    answer = chat(client, "hello", logprobs=True, stream=stream)
    choices = [chunk.choices[0] for chunk in answer if chunk.choices] if stream else answer.choices
    content = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert [entry.token for entry in content] == list("hello")
    assert all(entry.top_logprobs == [] for entry in content)


@pytest.mark.parametrize("stop", [None, ["world!", " 🙂?"], [" wörld"]])
@pytest.mark.parametrize("stream", [True, False])
def test_every_token_has_its_logprobs_also_where_it_brings_no_text(
    client: openai.OpenAI, stream: bool, stop: list[str] | None
) -> None:
    text = "hi 🙂 wörld 🙂"
    answer = chat(client, text, logprobs=True, stream=stream, n=2, stop=stop)
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    found = [0, 0]
    for choice in choices:
        found[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
    said = text.removesuffix(" wörld 🙂") if stop == [" wörld"] else text
    assert found == [len(said.encode())] * 2


def test_more_requests_than_may_wait_are_a_429(client: openai.OpenAI, eventually: Callable[..., Any]) -> None:
    streams = [chat(client, "hello", stream=True, extra_body={"ignore_eos": True}) for _ in range(4)]
    for stream in streams:
        next(iter(stream))
    with pytest.raises(openai.RateLimitError, match="does not fit: 4 of at most 4 are open; try again later"):
        chat(client, "hello")
    for stream in streams:
        stream.close()

    def is_served() -> bool:
        with contextlib.suppress(openai.RateLimitError):
            return bool(chat(client, "hello").choices)
        return False

    assert eventually(is_served)


def test_the_generation_is_told_with_the_weight_version(url: str) -> None:
    reply = httpx.post(f"{url}/generate", json={"model": "echo", "text": "hello"}, timeout=PATIENCE)
    (answer,) = reply.json()
    assert re.fullmatch(r"default\+g\d+", answer["meta_info"]["weight_version"])


def test_logprobs_of_the_prompt_are_not_implemented(url: str) -> None:
    body = {"model": "echo", "text": "hello", "return_logprob": True, "logprob_start_len": 0}
    reply = httpx.post(f"{url}/generate", json=body, timeout=PATIENCE)
    assert (reply.status_code, "no field for log-probabilities of the prompt" in reply.text) == (501, True)


def test_reloads_fan_out_to_the_control_app(url: str) -> None:
    path = f"{url}/v1/rl/engine/reload_forward?selector=engine=tokenspeed"
    headers = {"Content-Type": "application/json"}
    good = httpx.post(path, content=b'{"mode": "wait", "id": "a", "timeout_s": 600}', headers=headers, timeout=PATIENCE)
    (envelope,) = good.json()["results"].values()
    assert (good.status_code, envelope["status"], envelope["body"]["generation"]) == (200, 200, 2)

    bad = httpx.post(path, content=b'{"mode": "wait"}', timeout=PATIENCE)
    (envelope,) = bad.json()["results"].values()
    assert (bad.status_code, envelope["status"], envelope["body"]["code"]) == (207, 400, "bad_request")

    status = httpx.get(f"{url}/v1/rl/engine/reload_status?selector=engine=tokenspeed", timeout=PATIENCE)
    (envelope,) = status.json()["results"].values()
    assert envelope["body"]["state"] == "idle"


def test_the_gateway_flushes_the_cache(url: str, front: Any) -> None:
    before = len(front.received("FlushCache"))
    assert httpx.post(f"{url}/flush_cache", timeout=PATIENCE).status_code == 200
    assert len(front.received("FlushCache")) == before + 1


def test_a_tokenizer_that_the_gateway_cannot_read_comes_from_the_engine(
    start_front: Callable[..., Any], tokenizer_dir: Path, tmp_path: Path
) -> None:
    # The path means something in the directory of the engine only.
    front = start_front(CONFIG, cwd=tokenizer_dir.parent, tokenizer_path=tokenizer_dir.name).until_ready()
    with gateway(front, tmp_path) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        answer = chat(client, "hello world")
        assert answer.choices[0].message.content == "hello world"
        assert answer.usage.prompt_tokens == 14, "the template came along"
