from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokenspeed.errors import RequestError
from tokenspeed.runtime.protocol.state import ReloadStatus
from tokenspeed.server import reloads
from tokenspeed.server.errors import EngineLost
from tokenspeed.server.reloads import ReloadRequest, Reloads


class Engine:
    """Answers when told to, and counts what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.finished: list[dict[str, Any]] = []
        self.time = 100.0

    async def send(self, request: ReloadRequest) -> dict[str, Any]:
        self.asked.append(request.id)
        self.answers[request.id] = asyncio.get_running_loop().create_future()
        return await self.answers[request.id]

    def operations(self) -> Reloads:
        return Reloads(self.send, self.finished.append, clock=lambda: self.time)


async def test_the_same_id_in_flight_or_finished_is_the_same_operation() -> None:
    engine = Engine()
    operations = engine.operations()
    first = asyncio.create_task(operations.run(ReloadRequest(id="a")))
    second = asyncio.create_task(operations.run(ReloadRequest(id="a", mode="abort")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    engine.answers["a"].set_result({"success": True, "generation": 3})
    assert await first == await second == await operations.run(ReloadRequest(id="a"))
    assert engine.asked == ["a"]
    assert len(engine.finished) == 1
    assert operations.generation == 3


async def test_a_caller_that_goes_away_does_not_end_the_reload() -> None:
    engine = Engine()
    operations = engine.operations()
    caller = asyncio.create_task(operations.run(ReloadRequest(id="a")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait([caller])
    engine.answers["a"].set_result({"success": True})
    assert await operations.run(ReloadRequest(id="a")) == {"success": True}


async def test_the_status_follows_the_ranks_and_counts_from_the_arrival() -> None:
    engine = Engine()
    operations = engine.operations()
    assert operations.status() == {
        "state": "idle", "id": None, "by": None, "generation": 0, "elapsed": 0.0, "detail": "", "last": None,
    }  # fmt: skip

    calls = [asyncio.create_task(operations.run(ReloadRequest(id=name, by="me"))) for name in ("a", "b")]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    engine.time += 2
    assert operations.status()["state"] == "queued"
    operations.take(ReloadStatus(state="patching", generation=1, id="a", by="me", detail="qwen3"))
    status = operations.status()
    assert (status["state"], status["id"], status["by"], status["detail"]) == ("patching", "a", "me", "qwen3")
    assert status["elapsed"] == 2.0
    operations.take(ReloadStatus(state="queued", generation=1, id="b"))
    assert operations.status()["id"] == "a"

    operations.take(ReloadStatus(state="idle", generation=2))
    engine.answers["a"].set_result({"success": True, "generation": 2})
    await calls[0]
    status = operations.status()
    assert (status["state"], status["id"], status["generation"]) == ("queued", "b", 2)
    assert status["last"] == {"success": True, "generation": 2}

    operations.take(ReloadStatus(state="draining", generation=2, id="b"))
    operations.take(ReloadStatus(state="idle", generation=2))
    assert operations.status()["state"] == "idle"  # its reply may wait for the first held request's token
    engine.answers["b"].set_result({"success": False, "code": "cancelled"})
    await calls[1]
    assert operations.status()["state"] == "idle"


async def test_the_loss_of_the_engine_answers_with_phase_and_rank() -> None:
    engine = Engine()
    operations = engine.operations()
    call = asyncio.create_task(operations.run(ReloadRequest(id="a")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    operations.take(ReloadStatus(state="warming", generation=1, id="a"))
    engine.answers["a"].set_exception(EngineLost("rank 1 ended with signal SIGKILL", rank=1))
    body = await call
    assert (body["success"], body["code"], body["phase"], body["rank"]) == (False, "failed", "warm", 1)
    assert body["error"] == "rank 1 ended with signal SIGKILL"


async def test_only_so_many_replies_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloads, "KEPT_REPLIES", 2)
    engine = Engine()
    operations = engine.operations()
    for name in ("a", "b", "c", "a"):
        call = asyncio.create_task(operations.run(ReloadRequest(id=name)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        engine.answers[name].set_result({"success": True, "id": name})
        await call
    assert engine.asked == ["a", "b", "c", "a"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"id": ""}, "id must not be empty"),
        ({"id": "a", "timeout_s": 0.0}, "timeout_s must be above 0"),
        ({"id": "a", "timeout_s": -1.0}, "timeout_s must be above 0"),
        ({"id": "a", "modules": ()}, "modules must name"),
        ({"id": "a", "modules": ("",)}, "modules must name"),
    ],
)
def test_values_that_cannot_be_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        ReloadRequest(**fields).check()
