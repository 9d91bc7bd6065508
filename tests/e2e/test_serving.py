"""The bundled model through the gateway, as a client of the OpenAI API sees it."""

from __future__ import annotations

import random
import re
import threading
import time

import openai
import pytest

from tests.e2e.harness import HTTP, Server
from tests.waiting import PATIENCE


@pytest.fixture
def client(smollm2: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="none", max_retries=0)


def test_a_chat_answers_the_question(smollm2: Server, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=smollm2.served,
        messages=[{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}],
        temperature=0,
        max_tokens=24,
    )
    choice = answer.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens <= 24


def test_a_stream_says_the_same_as_one_answer(smollm2: Server, client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Count from one to ten."}]
    options = {"model": smollm2.served, "messages": messages, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**options, stream=True))  # type: ignore[call-overload]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert len(chunks) > 3, "a slow client gets several tokens at a time, but not all"


def test_a_completion_stops_at_a_stop_string_and_so_does_the_engine(smollm2: Server, client: openai.OpenAI) -> None:
    before = smollm2.metric("vllm:generation_tokens_total")
    answer = client.completions.create(
        model=smollm2.served, prompt="One, two, three, four,", temperature=0, max_tokens=300, stop=["seven"]
    )
    assert "six" in answer.choices[0].text and "seven" not in answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"
    assert smollm2.blocks_in_use() == 0
    assert smollm2.metric("vllm:generation_tokens_total") - before < 100


def test_a_seed_makes_sampling_repeatable(smollm2: Server, client: openai.OpenAI) -> None:
    def draw(seed: int) -> str:
        options = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 16, "seed": seed}
        return client.completions.create(model=smollm2.served, prompt="Once upon", **options).choices[0].text  # type: ignore[call-overload,no-any-return]

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_ignore_eos_and_the_token_limits(smollm2: Server) -> None:
    prompt = "The capital of France is"
    free = smollm2.complete(prompt, max_tokens=200)
    assert free["usage"]["completion_tokens"] <= 200
    forced = smollm2.complete(prompt, max_tokens=100, ignore_eos=True)
    assert forced["usage"]["completion_tokens"] == 100
    assert forced["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x " * 5000},
        {"prompt": ""},
        {"temperature": -1},
        {"top_p": 7},
        {"max_tokens": -3},
    ],
)
def test_a_bad_request_gets_a_4xx_and_the_server_goes_on(smollm2: Server, body: dict[str, object]) -> None:
    request = {"model": smollm2.served, "prompt": "Hello", "max_tokens": 4, "temperature": 0, **body}
    reply = HTTP.post(f"{smollm2.url}/v1/completions", json=request, timeout=PATIENCE)
    assert 400 <= reply.status_code < 500, reply.text
    assert smollm2.text("Hello")


def test_a_refused_request_is_told_to_its_client_and_to_no_log(smollm2: Server) -> None:
    before = smollm2.output()
    for body in ({"prompt": ""}, {"prompt": "x " * 5000}, {"prompt": "x", "model": "nobody"}):
        request = {"model": smollm2.served, "max_tokens": 4, **body}
        assert HTTP.post(f"{smollm2.url}/v1/completions", json=request, timeout=PATIENCE).status_code in (400, 404)
    new = smollm2.output().removeprefix(before)
    assert not re.search("ERROR|WARN|nobody|40[04]", new), new


def test_a_client_that_goes_away_frees_its_blocks(smollm2: Server, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=smollm2.served, prompt="Tell me a story", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    stream.close()
    assert smollm2.blocks_in_use() == 0


def test_two_hundred_short_requests_with_aborts_leave_no_block(smollm2: Server) -> None:
    draw = random.Random(0)
    plans = [(number, draw.random() < 0.3) for number in range(200)]
    failures: list[object] = []

    def ask(number: int, give_up: bool) -> None:
        body = {"model": smollm2.served, "prompt": f"Item {number}", "max_tokens": 6, "temperature": 0, "stream": True}
        try:
            with HTTP.stream("POST", f"{smollm2.url}/v1/completions", json=body, timeout=PATIENCE) as reply:
                assert reply.status_code == 200
                for _line in reply.iter_lines():
                    if give_up:
                        return
        except Exception as error:
            failures.append((number, error))

    def worker(mine: list[tuple[int, bool]]) -> None:
        for plan in mine:
            ask(*plan)

    threads = [threading.Thread(target=worker, args=(plans[index::20],)) for index in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert smollm2.blocks_in_use() == 0


def test_without_the_flag_a_reload_is_refused_on_arrival(smollm2: Server) -> None:
    reply = smollm2.reload()
    assert (reply["success"], reply["code"]) == (False, "not_enabled")
    assert "--allow-reload-forward" in reply["error"]


def test_sigusr1_tells_where_every_process_is_and_nothing_ends(smollm2: Server) -> None:
    before = len(smollm2.output())
    stacks = smollm2.stacks()[before:]
    assert stacks.count("in _run_module_as_main") == 2, "the front and the rank"
    assert "in turn" in stacks
    assert "in run_forever" in stacks
    assert smollm2.text("Hello")


def test_the_control_app_answers(smollm2: Server) -> None:
    assert smollm2.control("GET", "/health").status_code == 200
    info = smollm2.control("GET", "/server_info").json()
    assert info
    assert smollm2.control("POST", "/flush_cache").status_code == 200
    assert smollm2.control("GET", "/flush_cache").status_code == 200


def test_pause_holds_and_continue_lets_go(smollm2: Server) -> None:
    assert smollm2.control("POST", "/pause_generation", {"mode": "wait"}).json()["success"]
    answers: list[str] = []
    ask = threading.Thread(target=lambda: answers.append(smollm2.text("Hello")))
    ask.start()
    time.sleep(0.5)
    assert answers == []
    assert smollm2.control("POST", "/continue_generation", {}).json()["success"]
    ask.join()
    assert answers[0]
