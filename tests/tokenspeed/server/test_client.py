"""The engine as the front sees it, by the messages of its ranks alone."""

from __future__ import annotations

from tokenspeed.runtime.protocol.reports import Committed
from tokenspeed.runtime.protocol.state import ReloadStatus
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
