"""Answers that follow a grammar: through the gateway, and in its own language, on two ranks."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as rpc
from tokenizers import Tokenizer

from tests.e2e.harness import HTTP, Server
from tests.waiting import PATIENCE, until

EOS = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "likes": {"type": "array", "items": {"enum": ["tea", "rain", "cats"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}

UNKNOWN_TYPE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}


@pytest.fixture
def server(pair: Server) -> Server:
    return pair


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


def chat(server: Server, **options: Any) -> httpx.Response:
    body = {
        "model": server.served,
        "messages": [{"role": "user", "content": "Who are you?"}],
        "max_tokens": 200,
        "temperature": 1.0,
        **options,
    }
    return HTTP.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE)


def content(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "stop", reply.text
    text: str = choice["message"]["content"]
    return text


def check_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) == {"name", "age", "likes"}
    assert re.fullmatch("[A-Z][a-z]{2,8}", person["name"])
    assert 1 <= person["age"] <= 99
    assert 1 <= len(person["likes"]) <= 2
    assert set(person["likes"]) <= {"tea", "rain", "cats"}


def grpc_address(server: Server) -> str:
    workers = HTTP.get(f"{server.url}/workers", timeout=PATIENCE).json()["workers"]
    address: str = workers[0]["url"].removeprefix("grpc://")
    return address


def generate(server: Server, *requests: pb.GenerateRequest) -> list[list[pb.GenerateComplete]]:
    """The completions of each request, all of them sent at once."""

    async def run() -> list[list[pb.GenerateComplete]]:
        async with grpc.aio.insecure_channel(grpc_address(server)) as channel:
            scheduler: Any = rpc.TokenSpeedSchedulerStub(channel)

            async def one(request: pb.GenerateRequest) -> list[pb.GenerateComplete]:
                found = [reply.complete async for reply in scheduler.Generate(request) if reply.HasField("complete")]
                return sorted(found, key=lambda complete: complete.index)

            return await asyncio.gather(*map(one, requests))

    return asyncio.run(run())


def request(tokenizer: Tokenizer, text: str = "The answer is ", **sampling: Any) -> pb.GenerateRequest:
    sampling = {"max_new_tokens": 100, "temperature": 1.0, **sampling}
    ids = tokenizer.encode(text).ids
    return pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=ids), sampling_params=pb.SamplingParams(**sampling))


def text(tokenizer: Tokenizer, complete: pb.GenerateComplete) -> str:
    decoded: str = tokenizer.decode(list(complete.output_ids), skip_special_tokens=False)
    return decoded


# ---- through the gateway ----


def test_a_json_schema(smollm2: Server) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for seed in range(2):
        check_person(content(chat(smollm2, response_format=response_format, seed=seed, temperature=0.5)))


def test_any_json_object(smollm2: Server) -> None:
    reply = chat(smollm2, response_format={"type": "json_object"}, max_tokens=60)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert choice["message"]["content"].lstrip().startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"regex": "(yes|no), [0-9]{2}"}, "(yes|no), [0-9]{2}"),
        ({"ebnf": 'root ::= "<" part ">"\npart ::= [a-c] [a-c] [a-c]'}, "<[a-c]{3}>"),
    ],
)
def test_the_gateway_s_own_fields(server: Server, extra: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, content(chat(server, **extra)))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"regex": "(a"}, "parenthesis"),
        ({"ebnf": "root ::= missing"}, "missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
            "nonsense",
        ),
    ],
)
def test_a_grammar_that_is_not_valid_is_a_400_with_the_reason(
    server: Server, options: dict[str, Any], reason: str
) -> None:
    reply = chat(server, **options)
    assert reply.status_code == 400, reply.text
    assert reason in reply.text


# ---- directly ----


def test_all_kinds_of_grammar_at_once(server: Server, tokenizer: Tokenizer) -> None:
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "constant"}}
    asked = {
        "regex": ("[0-9]{3}-[0-9]{2}", "[0-9]{3}-[0-9]{2}"),
        "json_schema": (json.dumps({"enum": ["red", "green"]}), '"(red|green)"'),
        "ebnf_grammar": ('root ::= "x" [yz] "x"', "x[yz]x"),
        "structural_tag": (json.dumps(tag), "constant"),
    }
    requests = [
        request(tokenizer, sampling_seed=seed, **{name: source})
        for seed in range(3)
        for name, (source, _) in asked.items()
    ]
    patterns = [pattern for _ in range(3) for _, pattern in asked.values()]
    plain = request(tokenizer, max_new_tokens=20, temperature=0, ignore_eos=True)
    (alone,) = generate(server, plain)
    *answers, beside = generate(server, *requests, plain)
    for (complete,), pattern in zip(answers, patterns, strict=True):
        assert re.fullmatch(pattern, text(tokenizer, complete)), text(tokenizer, complete)
        assert (complete.finish_reason, complete.matched_token_id) == ("stop", EOS)
    assert list(beside[0].output_ids) == list(alone[0].output_ids), "who has no grammar is not touched by others'"


def test_each_of_several_answers_follows_the_grammar(server: Server, tokenizer: Tokenizer) -> None:
    (answers,) = generate(server, request(tokenizer, regex="[a-z]{6}", n=5, sampling_seed=3))
    found = [text(tokenizer, answer) for answer in answers]
    assert all(re.fullmatch("[a-z]{6}", answer) for answer in found)
    assert len(set(found)) > 1


def test_the_end_of_the_grammar_is_the_end_of_the_answer(server: Server, tokenizer: Tokenizer) -> None:
    asked = [
        request(tokenizer, regex="ab", min_new_tokens=50),
        request(tokenizer, regex="ab", ignore_eos=True),
        request(tokenizer, regex="ab", max_new_tokens=1),
        request(tokenizer, regex="a{1,60}", min_new_tokens=3, temperature=0, max_new_tokens=60),
    ]
    (least,), (ignored,), (short,), (longer,) = generate(server, *asked)
    assert (text(tokenizer, least), least.finish_reason) == ("ab", "stop")
    assert (text(tokenizer, ignored), ignored.finish_reason) == ("ab", "stop")
    assert short.finish_reason == "length"
    assert len(longer.output_ids) >= 3


def test_a_stop_string_cuts_an_answer_that_follows_a_grammar(server: Server, tokenizer: Tokenizer) -> None:
    ((answer,),) = generate(server, request(tokenizer, regex="[ab]{3}-[ab]{3}", stop=["-"]))
    assert answer.finish_reason == "stop"
    assert re.match("[ab]{3}-", text(tokenizer, answer))


def test_the_other_parameters_hold_within_the_grammar(server: Server, tokenizer: Tokenizer) -> None:
    bias = {str(tokenizer.token_to_id("a")): -100.0}
    ((answer,),) = generate(
        server,
        request(
            tokenizer,
            regex="[ab]{4}",
            temperature=0,
            logit_bias=bias,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            repetition_penalty=1.1,
        ),
    )
    assert re.fullmatch("[ab]{4}", text(tokenizer, answer))
    ((limited,),) = generate(server, request(tokenizer, regex="[a-z]{8}", top_k=3, top_p=0.5, min_p=0.2))
    assert re.fullmatch("[a-z]{8}", text(tokenizer, limited))


@pytest.mark.parametrize(
    "sampling", [{"regex": "(a"}, {"json_schema": "{"}, {"ebnf_grammar": "x"}, {"structural_tag": "{}"}, {"regex": " "}]
)
def test_what_cannot_be_compiled_is_an_invalid_argument(
    server: Server, tokenizer: Tokenizer, sampling: dict[str, str]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        generate(server, request(tokenizer, **sampling))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "/project/" not in (caught.value.details() or "")


# ---- over time ----


def test_a_grammar_goes_on_over_a_preemption(tiny_model: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    server = Server(str(tiny_model), "--max-total-tokens", "256", "--max-model-len", "256", log=tmp_path / "log")
    server.start()
    try:
        asked = [request(tokenizer, regex="[0-9]{150}", max_new_tokens=200, sampling_seed=seed) for seed in range(6)]
        answers = generate(server, *asked)
        assert server.metric("vllm:num_preemptions_total") > 0
        for (answer,) in answers:
            found = text(tokenizer, answer)
            assert re.fullmatch("[0-9]{150}", found), found
    finally:
        server.stop()


def test_a_grammar_goes_on_over_a_reload(server: Server, tokenizer: Tokenizer) -> None:
    answers: list[list[pb.GenerateComplete]] = []
    long = request(tokenizer, regex="([a-z]{5},){60}", max_new_tokens=400)
    thread = threading.Thread(target=lambda: answers.extend(generate(server, long)))
    thread.start()
    until(lambda: server.metric("vllm:num_requests_running") or not thread.is_alive())
    server.replace("tokenspeed.runtime.sampling.edits", ".where(may, -INF)", ".where(may, float('-inf'))")
    assert server.reload()["success"]
    thread.join()
    ((answer,),) = answers
    assert re.fullmatch("([a-z]{5},){60}", text(tokenizer, answer))
    ((after,),) = generate(server, request(tokenizer, regex="[0-9]{4}"))
    assert re.fullmatch("[0-9]{4}", text(tokenizer, after))


def test_code_that_loses_the_mask_ends_requests_with_an_error_and_nothing_else(
    server: Server, tokenizer: Tokenizer
) -> None:
    server.edit(
        "tokenspeed.runtime.sampling.sampler",
        lambda source: source.replace("if batch.mask is not None:", "if batch.mask is None:").replace(
            "logits = batch.mask.apply(logits)", "pass"
        ),
    )
    assert server.reload()["success"]
    with pytest.raises(grpc.aio.AioRpcError, match="the grammar does not permit") as caught:
        generate(server, request(tokenizer, regex="[0-9]{4}"))
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    generate(server, request(tokenizer, max_new_tokens=3))


def test_a_slow_grammar_holds_nobody_up_and_can_be_left(server: Server, tokenizer: Tokenizer) -> None:
    slow = "".join(f"[a-{last}]{{1,3000}}" for last in "bcdefghijklmnopqrstuvwxyz")

    async def run() -> None:
        async with grpc.aio.insecure_channel(grpc_address(server)) as channel:
            scheduler: Any = rpc.TokenSpeedSchedulerStub(channel)
            asked = request(tokenizer, regex=slow)
            asked.request_id = "slow"
            left = scheduler.Generate(request(tokenizer, regex=slow))
            waiting = scheduler.Generate(asked)
            reading = asyncio.ensure_future(waiting.read())
            await asyncio.to_thread(stop_compiling, server)
            left.cancel()
            quick = [reply async for reply in scheduler.Generate(request(tokenizer, regex="[0-9]{5}"))]
            assert re.fullmatch("[0-9]{5}", text(tokenizer, quick[-1].complete))
            plain = [reply async for reply in scheduler.Generate(request(tokenizer, max_new_tokens=5))]
            assert plain[-1].complete.completion_tokens
            assert not reading.done()
            assert (await scheduler.Abort(pb.AbortRequest(request_id="slow"))).success
            assert (await reading).complete.finish_reason == "abort"

    asyncio.run(run())
    assert server.blocks_in_use() == 0


def stop_compiling(server: Server) -> None:
    """Stop the process that compiles a grammar, so that it takes long on the fastest machine as well."""

    def at_work() -> psutil.Process | None:
        for pid in [pid for pid, line in server.processes().items() if "tokenspeed.grammar" in line]:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.rlimit(psutil.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
                    return process
        return None

    process = until(at_work)
    assert process is not None
    process.suspend()
