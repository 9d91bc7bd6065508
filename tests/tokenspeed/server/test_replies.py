"""The order in which the answers to one request reach the gateway."""

from __future__ import annotations

import asyncio

import pytest
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from tokenspeed.runtime.protocol.reports import RequestOutput
from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.server.journal import Entry
from tokenspeed.server.replies import responses
from tokenspeed.server.requests import Accepted
from tokenspeed.server.streams import TokenStream


async def answered(*, stream: bool) -> list[pb.GenerateResponse]:
    """The responses to a request with three answers, of which the last ends first and the first ends last."""
    sampling = SamplingParams(max_new_tokens=1)
    accepted = Accepted("three", [1, 2], (sampling,) * 3, (), stream, keep_stop_token=False, skip_special_tokens=True)
    news = asyncio.Event()
    entries = [Entry(f"three-{index}", "three", [1, 2], sampling, index=index) for index in range(3)]
    streams = [TokenStream(news=news) for _ in entries]

    async def speak() -> None:
        for index in (2, 1, 0):
            entries[index].tokens.append(index)
            streams[index].push(
                RequestOutput(request_id=entries[index].request_id, token_ids=[index], finish_reason="length")
            )
            await asyncio.sleep(0)

    speaking = asyncio.create_task(speak())
    found = [response async for response in responses(accepted, entries, streams, news, (None,) * 3)]
    await speaking
    return found


async def test_answers_that_are_not_streamed_come_in_order_since_the_gateway_numbers_them_as_they_come() -> None:
    completions = [response.complete for response in await answered(stream=False)]
    assert [complete.index for complete in completions] == [0, 1, 2]
    assert [list(complete.output_ids) for complete in completions] == [[0], [1], [2]]


@pytest.mark.parametrize("kind", ["chunk", "complete"])
async def test_a_streamed_answer_does_not_wait_for_those_before_it(kind: str) -> None:
    found = [getattr(response, kind) for response in await answered(stream=True) if response.HasField(kind)]
    assert [each.index for each in found] == [2, 1, 0]
