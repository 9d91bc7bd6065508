"""The engine as the front sees it, by the messages of its ranks alone."""

from __future__ import annotations

import asyncio

from tokenspeed.runtime.protocol.blackbox import Work
from tokenspeed.runtime.protocol.calls import Reload
from tokenspeed.runtime.protocol.reports import Committed, Outputs, RequestOutput
from tokenspeed.runtime.protocol.state import Loads, ReloadStatus
from tokenspeed.server.client import EngineClient
from tokenspeed.server.errors import EngineLost
from tokenspeed.server.metrics import Metrics


def test_a_generation_counts_from_its_commit_on_even_if_the_ranks_are_lost_before_they_say_more() -> None:
    told: list[ReloadStatus] = []
    client = EngineClient(Metrics("model"), report_generation=True, on_reload_status=told.append)
    client.take(Committed(generation=3, modules={}))
    assert client.weight_version.endswith("+g3")
    client.lose(EngineLost("rank 0 ended", rank=0))
    assert [(status.state, status.generation) for status in told] == [("idle", 3)]
    assert client.loads.generation == 3


async def test_a_reload_of_which_nothing_was_heard_is_known_by_what_the_ranks_left() -> None:
    client = EngineClient(Metrics("model"), on_reload_status=lambda status: None)
    client.take(ReloadStatus(state="idle", generation=2))
    client._closed = None  # as once ranks are ready
    calls = [asyncio.create_task(client.call(Reload, id=name)) for name in ("ran", "waits")]
    await asyncio.sleep(0)
    assert client.lose(EngineLost("rank 0 ended", rank=0), Work(reload=("ran", "patching")))
    failed = await calls[0]
    assert (failed["success"], failed["phase"], failed["rank"]) == (False, "patch", 0)
    assert not calls[1].done()
    calls[1].cancel()


def test_ranks_that_did_nothing_are_told_from_others() -> None:
    client = EngineClient(Metrics("model"), on_reload_status=lambda status: None)
    client.take(Outputs(outputs=[], loads=Loads()))
    assert not client.lose(EngineLost("rank 0 ended", rank=0))
    output = RequestOutput(request_id="1", token_ids=[4])
    client.take(Outputs(outputs=[output], loads=Loads()))
    assert client.lose(EngineLost("rank 0 ended", rank=0))
