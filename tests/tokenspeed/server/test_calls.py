"""What becomes of open control calls when the ranks are lost."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tokenspeed.runtime.protocol.calls import Continue, FlushCache, Pause, Reload, StartProfile, StopProfile
from tokenspeed.runtime.protocol.reports import CallReply
from tokenspeed.runtime.protocol.state import ReloadStatus
from tokenspeed.server.calls import Calls, OpenCall
from tokenspeed.server.errors import EngineLost

LOST = EngineLost("rank 1 ended with signal SIGKILL", rank=1)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def status(state: str, operation: str | None = None) -> ReloadStatus:
    return ReloadStatus(state=state, generation=3, id=operation)


def body(call: OpenCall) -> dict[str, Any]:
    assert call.reply.done()
    return call.reply.result()


async def test_what_has_no_trace_in_the_ranks_is_asked_again_in_order() -> None:
    calls = Calls()
    opened = [calls.open(kind) for kind in (Pause, FlushCache, Continue)]
    calls.lose(LOST, None)
    assert calls.again() == [call.message for call in opened]


@pytest.mark.parametrize(
    ("state", "phase"),
    [("reading", "read"), ("patching", "patch"), ("warming", "warm"), ("graphs", "graphs"), ("committing", "commit")],
)
async def test_a_reload_that_ran_has_failed_and_is_not_begun_again(state: str, phase: str) -> None:
    calls = Calls()
    ran, waits = calls.open(Reload, id="ran"), calls.open(Reload, id="waits")
    lost = EngineLost("rank 1 has not got on for 60 s", rank=1)
    lost.file, lost.line, lost.text = "llama.py", 88, "while True:"
    calls.lose(lost, status(state, "ran"))
    failed = body(ran)
    assert (failed["success"], failed["code"], failed["phase"], failed["rank"]) == (False, "failed", phase, 1)
    assert (failed["file"], failed["line"], failed["text"], failed["trace"]) == ("llama.py", 88, "while True:", [])
    assert failed["undone"]
    assert failed["message"] == (
        f"failed in {phase}: rank 1 has not got on for 60 s (llama.py:88); undone, the ranks are replaced and serve "
        "generation 3 on"
    )
    assert [call.call for call in calls.again()] == [waits.message.call]


@pytest.mark.parametrize("state", ["queued", "draining"])
async def test_a_reload_that_waits_waits_on_for_the_rest_of_its_time(state: str) -> None:
    clock = Clock()
    calls = Calls(clock)
    call = calls.open(Reload, id="a", timeout_s=100.0, by="me")
    clock.now = 30.0
    calls.lose(LOST, status(state, "a"))
    (again,) = calls.again()
    assert again == Reload(call=call.message.call, id="a", timeout_s=70.0, by="me")
    clock.now = 300.0
    (again,) = calls.again()
    assert isinstance(again, Reload)
    assert again.timeout_s == 0.0


async def test_a_reload_that_has_committed_says_so_though_its_reply_was_on_the_way() -> None:
    calls = Calls()
    call = calls.open(Reload, id="a")
    calls.commit(CallReply(call=call.message.call, body={"success": True, "generation": 4}))
    assert not call.reply.done()
    calls.lose(LOST, status("committing", "a"))
    assert body(call) == {"success": True, "generation": 4}
    assert calls.again() == []


@pytest.mark.parametrize("kind", [partial(StartProfile, profile_id="p", output_dir="/tmp"), StopProfile])
async def test_a_profile_that_was_to_begin_or_to_end_is_lost(kind: Any) -> None:
    calls = Calls()
    call = calls.open(kind)
    assert calls.slow
    calls.lose(LOST, None)
    assert not body(call)["success"]
    assert "the profile is lost with the ranks that recorded it" in body(call)["message"]


async def test_who_has_gone_is_asked_for_no_more() -> None:
    calls = Calls()
    call = calls.open(FlushCache)
    calls.close(call)
    calls.lose(LOST, None)
    assert calls.again() == []
    assert len(calls) == 0
