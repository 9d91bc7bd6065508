"""Several answers, log-probabilities, the weight version and the queue's limit, through gRPC with echo ranks."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import httpx
import pytest
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as rpc
from tokenizers import Tokenizer

from tests.waiting import PATIENCE
from tokenspeed.runtime.config import Config, ModelOptions, ReloadOptions, SchedulerOptions, ServeOptions

Build = Callable[..., pb.GenerateRequest]
CONFIG = Config(
    model=ModelOptions(model="echo"),
    reload=ReloadOptions(allow_reload_forward=True),
    scheduler=SchedulerOptions(max_num_seqs=4, max_queued_requests=3),
    serve=ServeOptions(report_generation=True),
)


@pytest.fixture(scope="module")
def front(start_shared_front: Callable[..., Any]) -> Any:
    # What ignores the end of its text goes on until it is told to end.
    return start_shared_front(CONFIG, step_seconds=0.002, max_model_len=10**6, num_blocks=10**5).until_ready()


@pytest.fixture
async def scheduler(front: Any) -> AsyncIterator[Any]:
    async with front.channel() as channel:
        yield rpc.TokenSpeedSchedulerStub(channel)


async def collect(scheduler: Any, request: pb.GenerateRequest) -> tuple[list[Any], dict[int, Any]]:
    """The chunks, and the completions by index."""
    chunks, completions = [], {}
    async for response in scheduler.Generate(request):
        assert response.request_id == request.request_id
        if response.WhichOneof("response") == "chunk":
            assert response.chunk.index not in completions, "a chunk after the completion"
            chunks.append(response.chunk)
        else:
            assert response.complete.index not in completions
            completions[response.complete.index] = response.complete
    return chunks, completions


def submitted(front: Any, request_id: str) -> list[dict[str, Any]]:
    return [m for m in front.received("Submit") if m["request_id"].startswith(f"{request_id}-")]


@pytest.mark.parametrize("stream", [True, False])
async def test_every_answer_comes_whole_under_its_index(
    scheduler: Any, generate_request: Build, tokenizer: Tokenizer, stream: bool
) -> None:
    chunks, completions = await collect(scheduler, generate_request("hello", n=3, stream=stream))
    assert set(completions) == {0, 1, 2}
    for index, complete in completions.items():
        assert tokenizer.decode(list(complete.output_ids)) == "hello"
        assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("stop", 5, 6)
        streamed = [token for chunk in chunks if chunk.index == index for token in chunk.token_ids]
        assert streamed == (list(complete.output_ids) if stream else [])


async def test_answers_are_requests_with_seeds_of_their_own_that_share_the_prompt(
    scheduler: Any, front: Any, generate_request: Build
) -> None:
    await collect(scheduler, generate_request("hi", n=3, request_id="three", sampling_seed=5))
    first, *others = submitted(front, "three")
    assert (first["sampling"]["seed"], first["shares_prompt_with"]) == (5, None)
    assert {other["shares_prompt_with"] for other in others} == {first["request_id"]}
    assert len({message["sampling"]["seed"] for message in (first, *others)}) == 3


async def test_each_answer_has_a_stop_string_s_end_of_its_own(scheduler: Any, generate_request: Build) -> None:
    request = generate_request("hello world", n=2, stop=["wor"], ignore_eos=True, max_new_tokens=400)
    _, completions = await collect(scheduler, request)
    assert [complete.matched_stop_str for complete in completions.values()] == ["wor", "wor"]
    assert [complete.completion_tokens for complete in completions.values()] == [9, 9]


async def test_a_stop_string_within_the_least_number_of_tokens_ends_nothing(
    scheduler: Any, generate_request: Build
) -> None:
    request = generate_request("ab ", stop=["ab"], ignore_eos=True, min_new_tokens=3, max_new_tokens=50)
    _, completions = await collect(scheduler, request)
    assert completions[0].completion_tokens == 5


async def test_abort_ends_all_answers(scheduler: Any, generate_request: Build) -> None:
    request = generate_request("hello", n=4, stream=True, ignore_eos=True, request_id="four")
    responses = aiter(scheduler.Generate(request))
    await anext(responses)
    assert (await scheduler.Abort(pb.AbortRequest(request_id="four"))).success
    ends = [r.complete.finish_reason async for r in responses if r.WhichOneof("response") == "complete"]
    assert ends == ["abort"] * 4


async def test_a_client_that_goes_away_ends_all_answers(
    scheduler: Any, front: Any, generate_request: Build, eventually: Callable[..., Any]
) -> None:
    request = generate_request("hello", n=4, stream=True, ignore_eos=True, request_id="gone")
    call = scheduler.Generate(request)
    await call.read()
    eventually(lambda: len(submitted(front, "gone")) == 4)
    call.cancel()
    ids = {message["request_id"] for message in submitted(front, "gone")}
    assert eventually(lambda: ids <= {message["request_id"] for message in front.received("Abort")})


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("keep", [True, False])
async def test_logprobs_belong_to_the_tokens_that_are_sent(
    scheduler: Any, generate_request: Build, stream: bool, keep: bool
) -> None:
    request = generate_request("hey", stream=stream, no_stop_trim=keep)
    request.MergeFrom(pb.GenerateRequest(return_logprob=True, top_logprobs_num=2))
    chunks, completions = await collect(scheduler, request)
    complete = completions[0]
    assert len(complete.output_ids) == (4 if keep else 3)
    for message, ids in ((complete, complete.output_ids), *((chunk, chunk.token_ids) for chunk in chunks)):
        logprobs = message.output_logprobs
        assert list(logprobs.token_ids) == list(ids)
        assert list(logprobs.token_logprobs) == [-0.25] * len(ids)
        assert [list(top.token_ids) for top in logprobs.top_logprobs] == [[i % 256, (i + 1) % 256] for i in ids]
        assert all(list(top.values) == [-0.25, -1.25] for top in logprobs.top_logprobs)
    assert sum(len(chunk.output_logprobs.token_ids) for chunk in chunks) == (len(complete.output_ids) * stream)


async def test_logprobs_end_with_the_stop_string(scheduler: Any, generate_request: Build) -> None:
    request = generate_request("hello", stop=["el"])
    request.return_logprob = True
    _, completions = await collect(scheduler, request)
    assert len(completions[0].output_logprobs.token_logprobs) == len(completions[0].output_ids) == 3
    assert not completions[0].output_logprobs.top_logprobs


async def test_without_the_wish_there_are_no_logprobs(scheduler: Any, generate_request: Build) -> None:
    chunks, completions = await collect(scheduler, generate_request("hello", stream=True))
    assert not any(message.HasField("output_logprobs") for message in (*chunks, completions[0]))


@pytest.mark.parametrize("fields", [{"return_logprob": True, "logprob_start_len": 0}, {"token_ids_logprob": [3]}])
async def test_logprobs_without_a_field_in_the_reply_are_unimplemented(
    scheduler: Any, generate_request: Build, fields: dict[str, Any]
) -> None:
    request = generate_request("hello")
    request.MergeFrom(pb.GenerateRequest(**fields))
    with pytest.raises(grpc.aio.AioRpcError, match="replies have no field") as caught:
        await collect(scheduler, request)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_every_reply_tells_which_weights_and_code_it_is_from(
    scheduler: Any, front: Any, generate_request: Build
) -> None:
    async def told() -> set[str]:
        chunks, completions = await collect(scheduler, generate_request("hello", stream=True, n=2))
        return {message.weight_version for message in (*chunks, *completions.values())}

    assert await told() == {"default+g1"}
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        await client.post(f"{front.control_url}/reload_forward", json={"id": "a"})
    assert await told() == {"default+g2"}


async def test_more_requests_than_may_wait_are_turned_away_until_others_have_ended(
    scheduler: Any, generate_request: Build
) -> None:
    long = [generate_request("hello", n=2, stream=True, ignore_eos=True, request_id=f"long{i}") for i in range(3)]
    calls = [scheduler.Generate(request) for request in long]
    await asyncio.gather(*(call.read() for call in calls))
    assert len((await collect(scheduler, generate_request("a")))[1]) == 1
    with pytest.raises(
        grpc.aio.AioRpcError, match="the 2 answers to this request do not fit: 6 of at most 7 are open"
    ) as caught:
        await collect(scheduler, generate_request("a", n=2))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    await scheduler.Abort(pb.AbortRequest(request_id="long0"))
    while await calls[0].read() is not grpc.aio.EOF:
        pass
    assert len((await collect(scheduler, generate_request("a", n=2)))[1]) == 2
    for request in long:
        await scheduler.Abort(pb.AbortRequest(request_id=request.request_id))


async def test_more_answers_than_ever_fit_are_the_request_s_own_fault(scheduler: Any, generate_request: Build) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(scheduler, generate_request("a", n=8))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_no_mix_of_answers_aborts_and_clients_that_go_away_leaves_anything_behind(
    scheduler: Any, front: Any, generate_request: Build
) -> None:
    draw = random.Random(5)
    ended: Counter[str] = Counter()

    async def one(number: int) -> None:
        name, n = f"mix{number % 7}", draw.randint(1, 3)
        options = {"ignore_eos": True, "max_new_tokens": draw.randint(1, 40)} if draw.random() < 0.7 else {}
        request = generate_request("hello", n=n, request_id=name, stream=draw.random() < 0.5, **options)
        plan, left = draw.choice(["stay", "abort", "leave"]), draw.randint(0, 5)
        while not await served(request, plan, left):
            ended["refused"] += 1
            await asyncio.sleep(0.01)

    async def served(request: pb.GenerateRequest, plan: str, left: int) -> bool:
        """Whether there was room for it."""
        seen: set[int] = set()
        call = scheduler.Generate(request)
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                if response.WhichOneof("response") == "complete":
                    assert response.complete.index not in seen
                    seen.add(response.complete.index)
                    ended[response.complete.finish_reason] += 1
                left -= 1
                if left == 0 and plan == "abort":
                    await scheduler.Abort(pb.AbortRequest(request_id=request.request_id))
                if left == 0 and plan == "leave":
                    call.cancel()
            assert seen == set(range(request.sampling_params.n))
        except asyncio.CancelledError:
            ended["left"] += 1
        except grpc.aio.AioRpcError as error:
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            return False
        return True

    await asyncio.gather(*(one(number) for number in range(150)))
    assert min(ended[how] for how in ("stop", "length", "abort", "left", "refused")) > 0
    async with asyncio.timeout(PATIENCE), httpx.AsyncClient(timeout=PATIENCE) as client:
        while (await client.get(f"{front.control_url}/server_info")).json()["loads"]["running"]:
            await asyncio.sleep(0.02)
        while (await scheduler.GetServerInfo(pb.GetServerInfoRequest())).active_requests:
            await asyncio.sleep(0.02)
