from __future__ import annotations

from typing import Any

import msgspec
import pytest
from google.protobuf import struct_pb2
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from tests.tokenspeed.server.engine_info import engine_info
from tokenspeed.errors import RequestError
from tokenspeed.runtime.protocol.state import EngineInfo
from tokenspeed.server.errors import UnsupportedCall
from tokenspeed.server.requests import Accepted, Intake


def request(prompt: list[int] | None = None, **params: Any) -> pb.GenerateRequest:
    ids = [1, 2, 3] if prompt is None else prompt
    return pb.GenerateRequest(
        request_id="r",
        tokenized=pb.TokenizedInput(input_ids=ids),
        sampling_params=pb.SamplingParams(**params),
    )


def accept(sent: pb.GenerateRequest, engine: EngineInfo | None = None) -> Accepted:
    return Intake(engine or engine_info(), seed=0).accept(sent)


def test_what_is_left_open_gets_openai_s_defaults_and_all_the_room() -> None:
    sampling = accept(request()).answers[0]
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.max_new_tokens == 29


def test_the_model_s_own_defaults_come_before_openai_s_and_after_the_request() -> None:
    engine = engine_info(default_sampling={"temperature": 0.6, "top_k": 20})
    assert accept(request(), engine).answers[0].temperature == 0.6
    assert accept(request(), engine).answers[0].top_k == 20
    assert accept(request(temperature=0.0), engine).answers[0].temperature == 0


def test_what_is_given_arrives() -> None:
    sent = request(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        max_new_tokens=5,
        min_new_tokens=2,
        stop=["a", "b", "a"],
        stop_token_ids=[9, 9, 4],
        ignore_eos=True,
        no_stop_trim=True,
        sampling_seed=11,
    )
    accepted = accept(sent)
    sampling = accepted.answers[0]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 7, 11)
    assert (sampling.max_new_tokens, sampling.min_new_tokens) == (5, 2)
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((9, 4), True)
    assert (accepted.stop, accepted.keep_stop_token) == (("a", "b"), True)


def test_more_new_tokens_than_fit_are_cut_to_the_context_or_the_cache() -> None:
    assert accept(request(max_new_tokens=1000, min_new_tokens=29)).answers[0].max_new_tokens == 29
    assert accept(request(max_new_tokens=1000), engine_info(num_blocks=4)).answers[0].max_new_tokens == 13


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert accept(request(temperature=1e-9)).answers[0].temperature == 0


def test_seeds_are_signed_64_bits_and_drawn_alike_by_every_server_with_the_same_seed() -> None:
    assert accept(request(sampling_seed=2**64 - 1)).answers[0].seed == -1
    assert accept(request(sampling_seed=0)).answers[0].seed == 0
    one, other = Intake(engine_info(), seed=3), Intake(engine_info(), seed=3)
    drawn = [one.accept(request()).answers[0].seed for _ in range(4)]
    assert drawn == [other.accept(request()).answers[0].seed for _ in range(4)]
    assert len(set(drawn)) == 4


def test_a_request_without_id_gets_one() -> None:
    sent = request()
    sent.request_id = ""
    assert accept(sent).request_id


@pytest.mark.parametrize(
    "defaults",
    [
        {"n": 1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        {"n": 0, "top_k": -1},
    ],
)
def test_what_the_gateway_sends_for_what_is_left_open_asks_for_nothing(defaults: dict[str, Any]) -> None:
    sent = request(**defaults)
    sent.logprob_start_len = -1
    (sampling,) = accept(sent).answers
    assert sampling == msgspec.structs.replace(accept(request()).answers[0], seed=sampling.seed)
    assert not sampling.needs_history
    assert sampling.logprobs is None


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1, 100]}, "token id 100"),
        ({"prompt": [1] * 32}, "maximum context length is 32"),
        ({"max_new_tokens": 0}, "max_new_tokens must be 1"),
        ({"min_new_tokens": 6, "max_new_tokens": 5}, "above max_new_tokens"),
        ({"min_new_tokens": 30}, "above max_new_tokens 29"),
        ({"min_new_tokens": 900, "max_new_tokens": 1000}, "only 29 tokens may follow"),
        ({"min_new_tokens": 1, "stop_token_ids": list(range(100))}, "every token"),
        ({"temperature": -0.1}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"temperature": float("inf")}, "temperature must be 0"),
        ({"top_p": 0.0}, "top_p must be"),
        ({"top_p": 1.5}, "top_p must be"),
        ({"top_p": float("nan")}, "top_p must be"),
        ({"top_k": -2}, "top_k must be"),
        ({"stop_token_ids": [100]}, "stop_token_ids has the token id 100"),
        ({"stop": ["a", ""]}, "must not be empty"),
        ({"stop": [str(number) for number in range(65)]}, "there are 65 stop strings; send at most 64"),
        ({"stop": ["a", "b" * 4097]}, "a stop string has 4097 characters; send at most 4096"),
        ({"n": 129}, "n must be between 1 and 128, not 129"),
        ({"n": 2**32 - 1}, "n must be between 1 and 128"),
        ({"min_p": 1.1}, "min_p must be between 0 and 1"),
        ({"min_p": float("nan")}, "min_p must be"),
        ({"frequency_penalty": 2.1}, "frequency_penalty must be between -2 and 2"),
        ({"presence_penalty": -2.1}, "presence_penalty must be between -2 and 2"),
        ({"presence_penalty": float("inf")}, "presence_penalty must be"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be between 0.01 and 100"),
        ({"repetition_penalty": -1.0}, "repetition_penalty must be"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be"),
        ({"logit_bias": {"1": 100.5}}, "logit_bias must be between -100 and 100"),
        ({"logit_bias": {"1": float("nan")}}, "logit_bias must be"),
        ({"logit_bias": {"100": 1.0}}, "logit_bias has the token id 100"),
        ({"logit_bias": {"-1": 1.0}}, "its keys are token ids"),
        ({"logit_bias": {"hello": 1.0}}, "its keys are token ids"),
        ({"logit_bias": {"": 1.0}}, "its keys are token ids"),
        ({"logit_bias": {"\N{ARABIC-INDIC DIGIT FIVE}": 1.0}}, "its keys are token ids"),
        ({"logit_bias": {"9" * 5000: 1.0}}, "its keys are token ids"),
        ({"logit_bias": {"5": 1.0, "05": 2.0}}, "the token id 5 twice"),
        ({"regex": ""}, "regex is empty"),
        ({"ebnf_grammar": " "}, "ebnf_grammar is empty"),
        ({"json_schema": "1" * 1_000_001}, "json_schema has 1000001 characters"),
        (
            {"custom_params": struct_pb2.Struct(fields={"a": struct_pb2.Value(bool_value=True)})},
            "custom_params",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(params: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        accept(request(**params))
    assert "\n" not in str(caught.value)


def test_a_prompt_larger_than_the_cache_is_refused_with_the_flag_to_raise() -> None:
    with pytest.raises(RequestError, match="--max-total-tokens"):
        accept(request([1] * 20), engine_info(num_blocks=4))


def test_fields_beside_the_sampling_that_are_not_there_are_refused() -> None:
    room, rank, images = request(), request(), request()
    room.kv_bootstrap_info.bootstrap_room = 1
    rank.data_parallel_rank = 1
    images.mm_inputs.items.add()
    for sent in (room, rank, images):
        with pytest.raises(RequestError, match="does not support"):
            accept(sent)


def test_penalties_and_bias_arrive() -> None:
    sent = request(
        min_p=0.25,
        presence_penalty=-2.0,
        frequency_penalty=0.5,
        repetition_penalty=1.5,
        logit_bias={"7": -100.0, "3": 2.5, "4": 0.0},
    )
    (sampling,) = accept(sent).answers
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.25, -2.0, 0.5)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.5, ((3, 2.5), (7, -100.0)))


def with_logprobs(**fields: Any) -> pb.GenerateRequest:
    sent = request()
    sent.MergeFrom(pb.GenerateRequest(return_logprob=True, **fields))
    return sent


def test_logprobs_are_those_of_the_answer() -> None:
    assert accept(with_logprobs()).answers[0].logprobs == 0
    assert accept(with_logprobs(top_logprobs_num=5, logprob_start_len=-1)).answers[0].logprobs == 5


def test_what_replies_have_no_field_for_is_no_call_of_this_server() -> None:
    for sent in (with_logprobs(logprob_start_len=0), with_logprobs(token_ids_logprob=[1])):
        with pytest.raises(UnsupportedCall, match="replies have no field"):
            accept(sent)


def test_numbers_of_top_logprobs_that_cannot_be_are_refused_and_alone_they_ask_for_nothing() -> None:
    for top in (-1, 129, 2**31 - 1):
        with pytest.raises(RequestError, match="top_logprobs_num must be between 0 and 128"):
            accept(with_logprobs(top_logprobs_num=top))
    sent = request()
    sent.top_logprobs_num = 3
    assert accept(sent).answers[0].logprobs is None


def test_several_answers_differ_in_their_seeds_alone() -> None:
    answers = accept(request(n=5, sampling_seed=11, temperature=0.5)).answers
    assert answers[0].seed == 11
    assert len({sampling.seed for sampling in answers}) == 5
    assert all(-(2**63) <= sampling.seed < 2**63 for sampling in answers)
    assert len({msgspec.structs.replace(sampling, seed=0) for sampling in answers}) == 1
    assert accept(request(n=3, sampling_seed=11, temperature=0.5)).answers == answers[:3]


def test_neighbouring_seeds_share_no_answers() -> None:
    seeds = [s.seed for seed in range(50) for s in accept(request(n=20, sampling_seed=seed)).answers]
    assert len(set(seeds)) == len(seeds)


def test_more_answers_than_the_server_ever_takes_are_refused() -> None:
    intake = Intake(engine_info(), seed=0, most_open=4)
    assert len(intake.accept(request(n=4)).answers) == 4
    with pytest.raises(RequestError, match="--max-queued-requests"):
        intake.accept(request(n=5))


@given(st.binary(max_size=60))
def test_no_bytes_of_the_wire_break_it(data: bytes) -> None:
    sent = pb.GenerateRequest()
    try:
        sent.ParseFromString(data)
    except Exception:  # not a request at all: gRPC refuses it
        return
    try:
        accepted = accept(sent)
    except RequestError:
        return
    assert 1 <= len(accepted.answers) <= 128
    assert len(accepted.prompt) + accepted.answers[0].max_new_tokens <= 32
