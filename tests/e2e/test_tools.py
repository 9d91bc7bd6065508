"""Tool calls and reasoning through the gateway, with the bundled model and its chat template.

The gateway's parsers see what a grammar makes the model say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.conftest import SMALL
from tests.e2e.harness import HTTP, Server
from tests.waiting import PATIENCE

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CALL = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "(Paris|Rome)", "days": [1-9]\}\}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tools")
    flags = (*SMALL, "--max-model-len", "1024", "--tool-call-parser", "qwen", "--reasoning-parser", "qwen3")
    server = Server("smollm2", *flags, log=folder / "log")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


def ask(client: openai.OpenAI, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    return client.chat.completions.create(
        model="smollm2", messages=messages, temperature=0, max_completion_tokens=100, **options
    )


def check_call(call: Any) -> None:
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "days"}
    assert arguments["city"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_the_client_demands(client: openai.OpenAI, choice: Any) -> None:
    answer = ask(client, tools=[WEATHER], tool_choice=choice).choices[0]
    assert answer.finish_reason in ("tool_calls", "stop")
    check_call(answer.message.tool_calls[0])


def test_a_call_that_the_model_makes(client: openai.OpenAI) -> None:
    answer = ask(client, tools=[WEATHER], extra_body={"regex": CALL}).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    check_call(call)
    assert not answer.message.content


def test_a_call_in_a_stream(client: openai.OpenAI) -> None:
    chunks = list(ask(client, tools=[WEATHER], stream=True, extra_body={"regex": CALL}))
    deltas = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
    assert next(delta.function.name for delta in deltas if delta.function.name) == "get_weather"
    arguments = json.loads("".join(delta.function.arguments or "" for delta in deltas))
    assert arguments["city"] in ("Paris", "Rome")
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_reasoning_is_apart_from_the_answer(client: openai.OpenAI) -> None:
    answer = ask(client, extra_body={"regex": "<think>(one|two)</think>(yes|no)"}).choices[0].message
    assert answer.reasoning_content in ("one", "two")
    assert answer.content in ("yes", "no")


def test_the_result_of_a_call_goes_back_into_the_conversation(server: Server) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Rome","days":1}'}}
    messages = [
        {"role": "user", "content": "What is the weather in Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    body = {"model": "smollm2", "messages": messages, "tools": [WEATHER], "max_tokens": 8, "temperature": 0}
    reply = HTTP.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"]
