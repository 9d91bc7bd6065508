"""The gRPC service of a running front, with echo ranks behind it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as rpc
from tokenizers import Tokenizer

from tokenspeed.runtime.config import Config, ModelOptions

Build = Callable[..., pb.GenerateRequest]
CONFIG = Config(model=ModelOptions(model="echo", served_model_name="echo-model"))


@pytest.fixture(scope="module")
def front(start_shared_front: Callable[..., Any]) -> Any:
    # What ignores the end of its text goes on until it is told to end.
    return start_shared_front(CONFIG, step_seconds=0.002, max_model_len=10**6, num_blocks=10**5).until_ready()


@pytest.fixture
async def scheduler(front: Any) -> AsyncIterator[Any]:
    async with front.channel() as channel:
        yield rpc.TokenSpeedSchedulerStub(channel)


async def collect(scheduler: Any, request: pb.GenerateRequest) -> tuple[list[Any], Any]:
    """The chunks and the completion."""
    responses = [response async for response in scheduler.Generate(request)]
    assert all(response.request_id == request.request_id for response in responses)
    *chunks, last = responses
    assert all(response.WhichOneof("response") == "chunk" for response in chunks)
    assert last.WhichOneof("response") == "complete"
    return [response.chunk for response in chunks], last.complete


def aborted(front: Any, request_id: str) -> int:
    """How often the engine was told to abort the request."""
    return sum(message["request_id"].startswith(f"{request_id}-") for message in front.received("Abort"))


def text(tokenizer: Tokenizer, ids: Any) -> str:
    return tokenizer.decode(list(ids))


async def test_streamed_chunks_add_up_to_the_completion(
    scheduler: Any, generate_request: Build, tokenizer: Tokenizer
) -> None:
    chunks, complete = await collect(scheduler, generate_request("hello", stream=True))
    assert [token for chunk in chunks for token in chunk.token_ids] == list(complete.output_ids)
    assert text(tokenizer, complete.output_ids) == "hello"
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", 257)
    assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (5, 6, 2)


async def test_without_streaming_there_is_one_response(scheduler: Any, generate_request: Build) -> None:
    chunks, complete = await collect(scheduler, generate_request("hello", max_new_tokens=3))
    assert (chunks, len(complete.output_ids), complete.finish_reason) == ([], 3, "length")
    assert complete.WhichOneof("matched_stop") is None


async def test_a_stop_token_is_kept_on_request(scheduler: Any, generate_request: Build) -> None:
    chunks, complete = await collect(scheduler, generate_request("ab", stream=True, no_stop_trim=True))
    assert complete.output_ids[-1] == 257
    assert chunks[-1].token_ids[-1] == 257
    assert complete.completion_tokens == len(complete.output_ids) == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_ends_the_engine_s_request_too(
    scheduler: Any,
    front: Any,
    generate_request: Build,
    tokenizer: Tokenizer,
    eventually: Callable[..., Any],
    stream: bool,
) -> None:
    request = generate_request("hello world", stream=stream, stop=["wor"], ignore_eos=True, max_new_tokens=400)
    chunks, complete = await collect(scheduler, request)
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "wor")
    assert text(tokenizer, complete.output_ids) == "hello wor"
    assert complete.completion_tokens == 9
    assert sum(len(chunk.token_ids) for chunk in chunks) == (9 if stream else 0)
    assert eventually(lambda: aborted(front, request.request_id)) == 1


async def test_a_client_that_goes_away_ends_the_engine_s_request(
    scheduler: Any, front: Any, generate_request: Build, eventually: Callable[..., Any]
) -> None:
    request = generate_request("hello", stream=True, ignore_eos=True)
    call = scheduler.Generate(request)
    await call.read()
    call.cancel()
    assert eventually(lambda: aborted(front, request.request_id)) == 1
    loads = await scheduler.GetLoads(pb.GetLoadsRequest())
    while loads.loads[0].num_running_reqs:
        loads = await scheduler.GetLoads(pb.GetLoadsRequest())


async def test_abort_gives_the_client_what_there_is(scheduler: Any, generate_request: Build) -> None:
    request = generate_request("hello", stream=True, ignore_eos=True, request_id="mine")
    answers = aiter(scheduler.Generate(request))
    await anext(answers)
    assert (await scheduler.Abort(pb.AbortRequest(request_id="mine"))).success
    responses = [response async for response in answers]
    assert responses[-1].complete.finish_reason == "abort"
    assert len(responses[-1].complete.output_ids) >= 1
    assert not (await scheduler.Abort(pb.AbortRequest(request_id="mine"))).success


async def test_requests_may_share_an_id_and_run_together(
    scheduler: Any, generate_request: Build, tokenizer: Tokenizer
) -> None:
    requests = [generate_request(f"request {n}", request_id="same", stream=n % 2 == 0) for n in range(40)]
    results = await asyncio.gather(*(collect(scheduler, request) for request in requests))
    assert [text(tokenizer, complete.output_ids) for _, complete in results] == [f"request {n}" for n in range(40)]


@pytest.mark.parametrize("params", [{"temperature": -1}, {"max_new_tokens": 0}, {"n": 129}, {"json_schema": ""}])
async def test_a_request_that_cannot_be_served_is_an_invalid_argument(
    scheduler: Any, generate_request: Build, params: dict[str, Any]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(scheduler, generate_request("a", **params))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    await collect(scheduler, generate_request("a"))


async def test_the_tokenizer_comes_as_an_archive(scheduler: Any, tokenizer_dir: Path) -> None:
    (tokenizer_dir / "model.safetensors").write_bytes(b"weights")
    chunks = [chunk async for chunk in scheduler.GetTokenizer(common.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == ["" for _ in chunks[1:]] + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as bundle:
        found = {name: bundle.read(name) for name in bundle.namelist()}
    names = ("config.json", "tokenizer.json", "tokenizer_config.json")
    assert found == {name: (tokenizer_dir / name).read_bytes() for name in names}


async def test_a_profile_reaches_the_engine_with_all_that_was_left_open_filled_in(scheduler: Any, front: Any) -> None:
    asked = common.StartProfileRequest(output_dir="/tmp/p", num_steps=3, activities=["CPU", "CPU"], record_shapes=True)
    assert (await scheduler.StartProfile(asked)).success
    assert (await scheduler.StopProfile(common.StopProfileRequest())).success
    (start,) = front.received("StartProfile")
    assert start.pop("profile_id")
    assert {name: start[name] for name in ("output_dir", "num_steps", "start_step", "activities")} == {
        "output_dir": "/tmp/p",
        "num_steps": 3,
        "start_step": 0,
        "activities": ["CPU"],
    }
    assert [start[name] for name in ("with_stack", "record_shapes", "profile_by_stage")] == [False, True, False]


@pytest.mark.parametrize("fields", [{"num_steps": 0}, {"start_step": -1}, {"activities": ["cpu"]}])
async def test_a_profile_that_cannot_be_made_is_an_invalid_argument(scheduler: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scheduler.StartProfile(common.StartProfileRequest(**fields))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_the_engine_describes_itself(scheduler: Any, front: Any) -> None:
    model = await scheduler.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_model_name, model.vocab_size, model.max_context_length) == ("echo-model", 260, 10**6)
    assert list(model.eos_token_ids) == [257]
    server = await scheduler.GetServerInfo(pb.GetServerInfoRequest())
    assert server.server_args["rl.control_url"] == front.control_url
    assert server.max_total_num_tokens == 16 * 10**5
    loads = await scheduler.GetLoads(pb.GetLoadsRequest())
    assert (loads.dp_rank_count, loads.loads[0].max_running_requests) == (1, 256)
    assert (await scheduler.HealthCheck(pb.HealthCheckRequest())).healthy
    assert (await scheduler.FlushCache(common.FlushCacheRequest())).success


async def test_the_load_of_a_running_request_shows(start_front: Callable[..., Any], generate_request: Build) -> None:
    front = start_front(CONFIG, step_seconds=0.002, max_model_len=10**6).until_ready()
    async with front.channel() as channel:
        scheduler: Any = rpc.TokenSpeedSchedulerStub(channel)
        call = scheduler.Generate(generate_request("hello", stream=True, ignore_eos=True))
        await call.read()
        load = (await scheduler.GetLoads(pb.GetLoadsRequest())).loads[0]
        assert (load.num_running_reqs, load.num_used_tokens, load.cache_hit_rate) == (1, 32, 0.4)
        assert load.active_token_usage == pytest.approx(0.001)
        assert (await scheduler.GetServerInfo(pb.GetServerInfoRequest())).active_requests == 1
        call.cancel()


async def test_before_the_engine_is_ready_nothing_is_served(
    start_front: Callable[..., Any], generate_request: Build
) -> None:
    front = start_front(CONFIG, start="never").until_listening()
    async with front.channel() as channel:
        scheduler, health = rpc.TokenSpeedSchedulerStub(channel), health_pb2_grpc.HealthStub(channel)
        status = await health.Check(health_pb2.HealthCheckRequest())
        assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not (await scheduler.HealthCheck(pb.HealthCheckRequest())).healthy
        for call in (
            scheduler.GetModelInfo(pb.GetModelInfoRequest()),
            scheduler.GetServerInfo(pb.GetServerInfoRequest()),
            scheduler.FlushCache(common.FlushCacheRequest()),
            scheduler.Generate(generate_request("a")).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="still starting") as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("service", ["", "tokenspeed.grpc.scheduler.TokenSpeedScheduler"])
async def test_the_standard_health_service_serves_when_ready(front: Any, service: str) -> None:
    async with front.channel() as channel:
        status = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        assert status.status == health_pb2.HealthCheckResponse.SERVING
