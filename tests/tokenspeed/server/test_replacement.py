"""Lost ranks are replaced: what is owed goes on as if nothing had happened, whatever was on its way."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import psutil
import pytest
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as rpc
from tokenizers import Tokenizer

from tests.waiting import PATIENCE
from tokenspeed.runtime.config import Config, ModelOptions, ParallelOptions, ReloadOptions
from tokenspeed.server.suspects import MOST_LOSSES, PROOF

Start = Callable[..., Any]
Ask = Callable[..., pb.GenerateRequest]
MODEL = ModelOptions(model="echo")
RELOADABLE = Config(model=MODEL, reload=ReloadOptions(allow_reload_forward=True))

ENDLESS = {"max_model_len": 10**6, "num_blocks": 10**5}
"""Of an engine whose requests go on until they are told to end, where they ignore the end of their text."""


class Engine:
    """A front with its clients."""

    def __init__(self, front: Any, stub: Any, control: httpx.AsyncClient) -> None:
        self.front = front
        self.stub = stub
        self.control = control

    async def kill(self, rank: int = 0) -> None:
        """Kill a rank, and return when its successors serve."""
        replaced = await self.replacements() + 1
        os.kill(self.front.rank_pid(rank), signal.SIGKILL)
        await self.until_replaced(replaced)

    async def until_replaced(self, times: int = 1) -> None:
        while await self.replacements() < times or (await self.control.get("/health")).status_code != 200:
            await asyncio.sleep(0.01)

    async def replacements(self) -> int:
        return await self.metric("rank_replacements_total")

    async def metric(self, name: str) -> int:
        lines = (await self.control.get("/metrics")).text.splitlines()
        return int(next(float(line.split()[-1]) for line in lines if f"{name}{{" in line))

    async def run(self, request: pb.GenerateRequest) -> pb.GenerateComplete:
        *_, last = [response async for response in self.stub.Generate(request)]
        return last.complete

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def serving(start_front: Start) -> Callable[..., Any]:
    @asynccontextmanager
    async def serve(config: Config = RELOADABLE, **behaviour: Any) -> AsyncIterator[Engine]:
        front = start_front(config, **behaviour).until_ready()
        async with (
            front.channel() as channel,
            httpx.AsyncClient(base_url=front.control_url, timeout=PATIENCE) as control,
        ):
            yield Engine(front, rpc.TokenSpeedSchedulerStub(channel), control)

    return serve


def spoken(ids: list[int], tokenizer: Tokenizer) -> str:
    return str(tokenizer.decode(ids))


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_stream_goes_on_where_it_was(
    serving: Callable[..., Any], generate_request: Ask, tokenizer: Tokenizer, eventually: Any, victim: int
) -> None:
    config = Config(model=MODEL, parallel=ParallelOptions(tensor_parallel_size=2))
    async with serving(config, free_steps=2) as engine:
        eventually(lambda: (engine.front.run_dir / "rank1.pid").exists())
        request = generate_request("abcdefghij" * 10, stream=True)
        request.return_logprob, request.top_logprobs_num = True, 2
        call = aiter(engine.stub.Generate(request))
        streamed = list((await anext(call)).chunk.token_ids)
        await engine.kill(victim)
        engine.front.let_go()
        responses = [response async for response in call]
        for response in responses[:-1]:
            streamed += response.chunk.token_ids
        assert spoken(streamed, tokenizer) == "abcdefghij" * 10
        complete = responses[-1].complete
        assert list(complete.output_ids) == streamed
        assert list(complete.output_logprobs.token_ids) == streamed
        assert len(complete.output_logprobs.top_logprobs) == 100
        assert complete.finish_reason == "stop"
        assert complete.completion_tokens == 101
        (before, after) = engine.front.received("Submit")
        assert before["request_id"] == after["request_id"]
        assert after["admitted"]
        assert after["generated"] == streamed[: len(after["generated"])]
        assert before["sampling"] == after["sampling"]
    assert engine.front.stop() == 0
    assert f"rank {victim} ended with signal SIGKILL" in engine.front.log()


async def test_what_comes_meanwhile_is_held(serving: Callable[..., Any], generate_request: Ask) -> None:
    async with serving(restarts=("1", "ready")) as engine:
        os.kill(engine.front.rank_pid(0), signal.SIGKILL)
        while (health := await engine.control.get("/health")).status_code == 200:
            pass
        assert "the ranks are being replaced: rank 0 ended" in health.json()["message"]
        flushed, answer = await asyncio.gather(
            engine.control.post("/flush_cache"), engine.run(generate_request("hello"))
        )
        assert flushed.json()["success"]
        assert answer.completion_tokens == 6
        assert "could not be started again: rank 0 ended with exit code 1" in engine.front.log()


async def test_two_failed_starts_end_the_server(serving: Callable[..., Any], generate_request: Ask) -> None:
    async with serving(restarts=("failed",), step_seconds=0.02, **ENDLESS) as engine:
        call = aiter(engine.stub.Generate(generate_request("hello", stream=True, ignore_eos=True)))
        await anext(call)
        os.kill(engine.front.rank_pid(0), signal.SIGKILL)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        sentence = (
            "rank 0 ended with signal SIGKILL; see its messages above; the ranks could not be started again: "
            "the weights are damaged; download them again"
        )
        assert caught.value.details() == sentence
        assert engine.front.wait_for("failed") == {"event": "failed", "message": sentence, "exit_code": 3}
        assert await asyncio.to_thread(engine.front.process.wait, PATIENCE) == 3


async def test_ranks_that_are_lost_whatever_they_do_end_the_server(serving: Callable[..., Any]) -> None:
    async with serving(restarts=("unstable",)) as engine:
        os.kill(engine.front.rank_pid(0), signal.SIGKILL)
        failed = await asyncio.to_thread(engine.front.wait_for, "failed")
        assert failed["message"].endswith("; 5 sets of ranks in a row were lost before they had anything to do")
        assert await asyncio.to_thread(engine.front.process.wait, PATIENCE) == failed["exit_code"] == 1


async def test_a_stop_during_a_replacement_is_obeyed(serving: Callable[..., Any], generate_request: Ask) -> None:
    async with serving(restarts=("never",), step_seconds=0.02, **ENDLESS) as engine:
        call = aiter(engine.stub.Generate(generate_request("hello", stream=True, ignore_eos=True)))
        await anext(call)
        first = engine.front.rank_pid(0)
        os.kill(first, signal.SIGKILL)
        await engine.until(lambda: engine.front.rank_pid(0) != first)
        for _ in range(2):  # the second one cuts the drain short
            engine.front.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
        with pytest.raises(grpc.aio.AioRpcError, match="stopped before"):
            async for _ in call:
                pass
        assert await asyncio.to_thread(engine.front.process.wait, PATIENCE) == 0
        assert engine.front.log().count("Traceback") == 0


@pytest.mark.parametrize("how", ["poison", "garbled"])
async def test_a_request_that_kills_its_ranks_ends_and_no_other(
    serving: Callable[..., Any], generate_request: Ask, tokenizer: Tokenizer, how: str
) -> None:
    (poison,) = tokenizer.encode("!", add_special_tokens=False).ids
    async with serving(**{how: poison}, step_seconds=0.01) as engine:
        others = [asyncio.create_task(engine.run(generate_request("abc" * 60))) for _ in range(3)]
        await engine.until(lambda: len(engine.front.received("Submit")) == 3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await engine.run(generate_request("boo!"))
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        assert re.match(r"the ranks were lost [234] times while this request ran \(", str(caught.value.details()))
        for answer in await asyncio.gather(*others):
            assert spoken(list(answer.output_ids), tokenizer) == "abc" * 60
        assert 2 <= await engine.replacements() <= 4
        assert (await engine.run(generate_request("fine"))).finish_reason == "stop"


async def test_a_failed_step_ends_its_requests_as_on_one_rank(
    serving: Callable[..., Any], generate_request: Ask, tokenizer: Tokenizer
) -> None:
    (broken,) = tokenizer.encode("!", add_special_tokens=False).ids
    async with serving(broken=broken, step_seconds=0.01) as engine:
        other = asyncio.create_task(engine.run(generate_request("abc" * 60)))
        await engine.until(lambda: engine.front.received("Submit"))
        with pytest.raises(grpc.aio.AioRpcError, match="forward pass failed with OSError: broken"):
            await engine.run(generate_request("boo!"))
        assert spoken(list((await other).output_ids), tokenizer) == "abc" * 60
        assert await engine.replacements() == 1


async def test_a_reload_that_ran_has_failed_and_those_that_wait_run(serving: Callable[..., Any]) -> None:
    async with serving(reload_waits=True) as engine:
        calls = [asyncio.create_task(engine.control.post("/reload_forward", json={"id": name})) for name in "ab"]
        while (await engine.control.get("/reload_status")).json()["state"] != "reading":
            pass
        os.kill(engine.front.rank_pid(0), signal.SIGKILL)
        engine.front.let_go()
        await engine.until_replaced()
        replies = [(await call).json() for call in calls]
        failed = next(reply for reply in replies if not reply["success"])
        assert (failed["code"], failed["phase"], failed["rank"], failed["undone"]) == ("failed", "read", 0, True)
        assert "SIGKILL" in failed["error"]
        assert [reply["success"] for reply in replies].count(True) == 1
        assert (await engine.control.get("/reload_status")).json()["state"] == "idle"


async def test_a_pause_holds_on(serving: Callable[..., Any], generate_request: Ask) -> None:
    async with serving() as engine:
        assert (await engine.control.post("/pause_generation")).json()["success"]
        await engine.kill()
        held = asyncio.create_task(engine.run(generate_request("hello")))
        await engine.until(lambda: engine.front.received("Submit"))
        await asyncio.sleep(0.1)
        assert not held.done()
        await engine.kill()
        assert not held.done()
        assert (await engine.control.post("/continue_generation")).json()["success"]
        assert (await held).completion_tokens == 6


async def test_ranks_that_are_lost_in_reloads_make_no_suspects_of_what_these_kept(
    serving: Callable[..., Any], generate_request: Ask
) -> None:
    async with serving(reload_waits=True, step_seconds=0.01, **ENDLESS) as engine:
        call = engine.stub.Generate(generate_request("abc", stream=True, ignore_eos=True))
        kept = aiter(call)
        for number in range(MOST_LOSSES + 1):
            await anext(kept)
            reload = asyncio.create_task(
                engine.control.post("/reload_forward", json={"id": str(number), "mode": "keep"})
            )
            while (await engine.control.get("/reload_status")).json()["state"] != "reading":
                await asyncio.sleep(0.01)
            await engine.kill()
            assert (await reload).json()["undone"]
        await anext(kept)
        call.cancel()


async def test_a_pause_that_waits_waits_for_the_rest_of_what_ran(
    serving: Callable[..., Any], generate_request: Ask, tokenizer: Tokenizer
) -> None:
    async with serving(step_seconds=0.02) as engine:
        call = asyncio.create_task(engine.run(generate_request("abc" * 30)))
        await engine.until(lambda: engine.front.received("Submit"))
        pause = asyncio.create_task(engine.control.post("/pause_generation"))
        await engine.until(lambda: engine.front.received("Pause"))
        await engine.kill()
        kinds = [message["type"] for message in engine.front.received_all()]
        second = kinds.index("Submit", kinds.index("Submit") + 1)
        assert "Pause" in kinds[second:]
        assert spoken(list((await call).output_ids), tokenizer) == "abc" * 30
        assert (await pause).json()["success"]


async def test_a_pause_that_holds_what_runs_holds_it_on_other_ranks(
    serving: Callable[..., Any], generate_request: Ask, tokenizer: Tokenizer
) -> None:
    async with serving(step_seconds=0.02) as engine:
        call = asyncio.create_task(engine.run(generate_request("abc" * 30)))
        await engine.until(lambda: engine.front.received("Submit"))
        assert (await engine.control.post("/pause_generation", json={"mode": "keep"})).json()["success"]
        for _ in range(3):  # it did not run, so that it is no suspect, and not tried alone
            await engine.kill()
        assert [message["mode"] for message in engine.front.received("Pause")][1:] == ["keep"] * 3
        await asyncio.sleep(0.1)
        assert not call.done()
        assert (await engine.control.post("/continue_generation")).json()["success"]
        assert spoken(list((await call).output_ids), tokenizer) == "abc" * 30


async def test_aborts_and_clients_that_go_away_meanwhile_are_not_forgotten(
    serving: Callable[..., Any], generate_request: Ask
) -> None:
    async with serving(restarts=("1", "ready"), step_seconds=0.02, **ENDLESS) as engine:
        aborted = asyncio.create_task(engine.run(generate_request("abc", request_id="aborted", ignore_eos=True)))
        left = engine.stub.Generate(generate_request("abc", stream=True, ignore_eos=True))
        await anext(aiter(left))
        os.kill(engine.front.rank_pid(0), signal.SIGKILL)
        while (await engine.control.get("/health")).status_code == 200:
            pass
        assert (await engine.stub.Abort(pb.AbortRequest(request_id="aborted"))).success
        assert (await aborted).finish_reason == "abort"
        left.cancel()
        await engine.until_replaced()
        assert len(engine.front.received("Submit")) <= 3
        while (await engine.stub.GetServerInfo(pb.GetServerInfoRequest())).active_requests:
            pass


async def test_subscribers_of_the_cache_hear_that_it_is_empty(serving: Callable[..., Any]) -> None:
    async with serving() as engine:
        call = aiter(engine.stub.SubscribeKvEvents(common.SubscribeKvEventsRequest()))
        first = await anext(call)
        assert first.HasField("snapshot")
        await engine.kill()
        while not (batch := await anext(call)).events:
            pass
        assert batch.events[0].HasField("cleared")
        assert batch.sequence_number == first.sequence_number + 1
        assert len(engine.front.received("WatchCache")) == 2
        kinds = [message["type"] for message in engine.front.received_all()]
        assert kinds[kinds.index("WatchCache") + 1 :].index("WatchCache") == 0 or "Submit" not in kinds


async def test_nothing_is_left_of_lost_ranks(serving: Callable[..., Any], generate_request: Ask) -> None:
    async with serving(step_seconds=0.005, **ENDLESS) as engine:
        process = psutil.Process(engine.front.process.pid)
        call = engine.stub.Generate(generate_request("abcd", ignore_eos=True))
        found = []
        for _ in range(6):
            before = await engine.metric("vllm:generation_tokens_total")
            while await engine.metric("vllm:generation_tokens_total") < before + PROOF:
                await asyncio.sleep(0.01)  # what gets on is not taken for the cause
            await engine.kill()
            children = len(process.children(recursive=True))
            found.append(
                (process.num_fds(), process.num_threads(), children, len(list(engine.front.run_dir.iterdir())))
            )
        assert found[-1] == found[-3], found
        call.cancel()
    assert engine.front.stop() == 0
    assert not [path for path in engine.front.run_dir.iterdir() if path.is_dir()]


async def test_memory_is_kept_only_where_reloads_are_permitted(serving: Callable[..., Any]) -> None:
    for config in (Config(model=MODEL), RELOADABLE):
        async with serving(config) as engine:
            command = psutil.Process(engine.front.rank_pid(0)).cmdline()
            assert ("--keeper-fd" in command) == config.reload.allow_reload_forward
