"""The control queue on one rank, with the real scheduler and a loop that the test turns by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.runtime.cache.manager import KVCacheManager
from tokenspeed.runtime.engine.control import ControlQueue
from tokenspeed.runtime.engine.directives import Begin, Settle
from tokenspeed.runtime.protocol.calls import Continue, Pause, Reload
from tokenspeed.runtime.protocol.message import Message
from tokenspeed.runtime.protocol.reports import CallReply, Outputs
from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.runtime.protocol.state import ReloadStatus
from tokenspeed.runtime.reload.failures import CostRanks
from tokenspeed.runtime.scheduler.batch import Batch
from tokenspeed.runtime.scheduler.limits import SchedulerLimits
from tokenspeed.runtime.scheduler.request import Request
from tokenspeed.runtime.scheduler.scheduler import Scheduler


class RecordingOutbox:
    """Keeps what would be sent to the front."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def outputs(self, outputs: Any, loads: Any) -> None:
        self.send(Outputs(outputs=outputs, loads=loads))

    def reply(self, call: Any, body: dict[str, Any]) -> None:
        self.send(CallReply(call=call.call, body=body))


class ScriptedReload:
    """Stands for the transaction: notes when it ran, and answers with success."""

    generation = 0

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.ran: list[str] = []
        self.kept: list[list[str]] = []
        """Requests that ran at each of them."""
        self.broken: set[str] = set()
        self.costly: set[str] = set()
        self.unchanged: set[str] = set()

    def settle_early(self, call: Reload) -> dict[str, Any] | None:
        if call.id in self.unchanged:
            return {"success": True, "id": call.id, "modules": []}
        return None

    def run(self, call: Reload, drained_after: float) -> dict[str, Any]:
        assert not self.scheduler.in_flight
        self.ran.append(call.id)
        self.kept.append(self.scheduler.running_ids)
        if call.id in self.costly:
            raise CostRanks({"success": False, "id": call.id, "rank": 0, "error": "out of bounds"})
        if call.id in self.broken:
            return {"success": False, "id": call.id, "modules": []}
        self.scheduler.recompute_running()
        return {"success": True, "id": call.id, "modules": ["m"], "seconds": {"drain": drained_after, "held": 0.0}}


class Engine:
    """One rank without a model: every step samples id 7."""

    def __init__(self, overlap: bool = False) -> None:
        self.overlap = overlap
        self.flight: Batch | None = None
        limits = SchedulerLimits(
            max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, block_size=4, eos_token_ids=(0,)
        )
        self.scheduler = Scheduler(limits, KVCacheManager(64, 4, True))
        self.outbox = RecordingOutbox()
        self.reload = ScriptedReload(self.scheduler)
        self.control = ControlQueue(self.scheduler, self.outbox, self.reload)  # type: ignore[arg-type]
        self.calls = 0

    def submit(self, name: str, tokens: int = 3) -> None:
        self.control.submitted(name)
        self.scheduler.submit(Request(name, [1, 2, 3], SamplingParams(max_new_tokens=tokens)))

    def call(self) -> int:
        self.calls += 1
        return self.calls

    def turn(self) -> None:
        """One round of the loop."""
        for directive in self.control.decide():
            match directive:
                case Begin():
                    self.control.begin(directive)
                case Settle():
                    self.control.settle(directive)
                case _:
                    self.control.expire(directive)
        self.control.advance()
        batch = self.scheduler.schedule()
        self.commit()
        self.flight = batch
        if not self.overlap:
            self.commit()

    def commit(self) -> None:
        batch, self.flight = self.flight, None
        if batch is not None:
            self.control.publish(self.scheduler.commit(batch, [7] * batch.num_samples))

    def tokens(self, name: str) -> int:
        """How many were sent so far."""
        outputs = [o for m in self.outbox.sent if isinstance(m, Outputs) for o in m.outputs]
        return sum(len(o.token_ids) for o in outputs if o.request_id == name)

    def turns(self, count: int = 10) -> None:
        for _ in range(count):
            self.turn()

    def replies(self) -> dict[int, dict[str, Any]]:
        return {m.call: m.body for m in self.outbox.sent if isinstance(m, CallReply)}

    def finished(self) -> dict[str, str]:
        outputs = [o for m in self.outbox.sent if isinstance(m, Outputs) for o in m.outputs]
        return {o.request_id: o.finish_reason for o in outputs if o.finish_reason}

    def states(self) -> list[str]:
        return [m.state for m in self.outbox.sent if isinstance(m, ReloadStatus)]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def reload(engine: Engine, name: str = "a", **fields: Any) -> int:
    call = engine.call()
    engine.control.add(Reload(call=call, id=name, **fields))
    return call


def pause(engine: Engine, mode: Any = "wait") -> int:
    call = engine.call()
    engine.control.pause(Pause(call=call, mode=mode))
    return call


def resume(engine: Engine) -> int:
    call = engine.call()
    engine.control.resume(Continue(call=call))
    return call


def test_wait_lets_running_requests_finish_and_holds_new_ones(engine: Engine) -> None:
    engine.submit("running", tokens=5)
    engine.turn()
    call = reload(engine)
    engine.submit("held")
    engine.turns(3)
    assert engine.reload.ran == []
    assert "held" not in engine.finished()
    engine.turns()
    assert engine.reload.ran == ["a"]
    assert engine.finished() == {"running": "length", "held": "length"}
    assert engine.replies()[call]["seconds"]["held"] > 0


def test_abort_ends_running_requests_and_keeps_held_ones(engine: Engine) -> None:
    engine.submit("running", tokens=50)
    engine.turn()
    reload(engine, mode="abort")
    engine.submit("held")
    engine.turn()
    engine.turn()
    assert engine.reload.ran == ["a"]
    engine.turns()
    assert engine.finished() == {"running": "abort", "held": "length"}


def test_nothing_changed_neither_drains_nor_holds(engine: Engine) -> None:
    engine.submit("running", tokens=50)
    engine.turn()
    engine.reload.unchanged.add("a")
    call = reload(engine, mode="abort")
    engine.submit("new")
    engine.turn()
    assert engine.replies()[call]["success"]
    assert engine.reload.ran == []
    assert engine.finished() == {}
    engine.turns()
    assert engine.finished() == {"new": "length"}


def test_reloads_run_in_arrival_order(engine: Engine) -> None:
    engine.submit("running", tokens=4)
    engine.turn()
    calls = [reload(engine, name) for name in "abc"]
    engine.turns()
    assert engine.reload.ran == ["a", "b", "c"]
    assert [engine.replies()[call]["id"] for call in calls] == ["a", "b", "c"]


def test_a_reload_that_does_not_drain_in_time_fails_and_lets_go(engine: Engine) -> None:
    engine.submit("running", tokens=50)
    engine.turn()
    call = reload(engine, timeout_s=0.0)
    engine.submit("new")
    engine.turns()
    assert engine.replies()[call]["code"] == "timeout"
    assert engine.reload.ran == []
    assert engine.finished()["new"] == "length"


def test_continue_cancels_waiting_reloads_and_pauses(engine: Engine) -> None:
    engine.submit("running", tokens=50)
    engine.turn()
    paused = pause(engine)
    waiting = [reload(engine, name) for name in "ab"]
    engine.turn()
    engine.submit("held")
    resumed = resume(engine)
    engine.turns()
    replies = engine.replies()
    assert [replies[call]["code"] for call in waiting] == ["cancelled", "cancelled"]
    assert [replies[call]["phase"] for call in waiting] == ["drain", "queue"]
    assert not replies[paused]["success"]
    assert replies[resumed] == {"success": True, "message": "generation continues", "cancelled": 3}
    assert engine.finished()["held"] == "length"


def test_a_directive_for_a_cancelled_reload_is_ignored(engine: Engine) -> None:
    reload(engine, "a")
    directives = engine.control.decide()
    resume(engine)
    assert directives == [Begin(id="a")]
    engine.control.begin(Begin(id="a"))
    engine.control.settle(Settle(id="a", body={"success": True, "modules": []}))
    engine.turns()
    assert engine.reload.ran == []


def test_pause_wait_replies_when_drained_and_holds_until_continue(engine: Engine) -> None:
    engine.submit("running", tokens=4)
    engine.turn()
    call = pause(engine)
    engine.submit("held")
    engine.turn()
    assert call not in engine.replies()
    engine.turns()
    assert engine.replies()[call]["success"]
    assert engine.finished() == {"running": "length"}
    resume(engine)
    engine.turns()
    assert engine.finished()["held"] == "length"


def test_pause_abort_ends_running_requests(engine: Engine) -> None:
    engine.submit("running", tokens=40)
    engine.turn()
    call = pause(engine, "abort")
    engine.turn()
    assert engine.replies()[call]["success"]
    assert engine.finished() == {"running": "abort"}


def test_a_second_pause_is_answered_too(engine: Engine) -> None:
    first, second = pause(engine), pause(engine)
    engine.turn()
    assert engine.replies()[first]["success"] and engine.replies()[second]["success"]


def test_a_reload_while_paused_runs_at_once_and_stays_paused(engine: Engine) -> None:
    pause(engine)
    engine.turn()
    engine.submit("held")
    call = reload(engine)
    engine.turns()
    assert engine.reload.ran == ["a"]
    assert engine.replies()[call]["success"]
    assert engine.finished() == {}
    resume(engine)
    engine.turns()
    assert engine.finished() == {"held": "length"}


@pytest.mark.parametrize("second", [reload, pause])
def test_a_reply_that_waits_for_a_held_request_does_not_get_lost(engine: Engine, second: Any) -> None:
    for name in "abcd":  # all seats are taken as soon as admission opens again
        engine.submit(name, tokens=50)
    first = reload(engine)
    engine.submit("held")
    engine.turn()
    assert first not in engine.replies()
    last = second(engine, "b") if second is reload else second(engine, "abort")
    assert engine.replies()[first]["seconds"]["held"] > 0
    engine.turn()
    for name in "abcd":
        engine.control.publish(engine.scheduler.abort(name))
    engine.turns(5)
    resume(engine)
    engine.turns()
    assert engine.replies()[last]["success"]
    assert engine.finished()["held"] == "length"


def test_states_are_reported_in_order(engine: Engine) -> None:
    reload(engine)
    engine.turns()
    assert engine.states() == ["queued", "draining", "idle"]


def test_a_reload_that_expires_behind_another_leaves_its_state(engine: Engine) -> None:
    engine.submit("running", tokens=5)
    engine.turn()
    reload(engine, "first")
    engine.turn()
    reload(engine, "second", timeout_s=0.0)
    engine.turn()
    last = [m for m in engine.outbox.sent if isinstance(m, ReloadStatus)][-1]
    assert (last.state, last.id) == ("draining", "first")


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def either(request: pytest.FixtureRequest) -> Engine:
    """With and without a step in flight."""
    return Engine(overlap=request.param)


@pytest.mark.parametrize("is_broken", [False, True])
def test_keep_holds_running_requests_and_lets_them_go_on(either: Engine, is_broken: bool) -> None:
    engine = either
    engine.reload.broken = {"a"} if is_broken else set()
    engine.submit("running", tokens=9)
    engine.turns(3)
    call = reload(engine, mode="keep")
    engine.submit("held")
    engine.turns(2)
    assert engine.reload.ran == ["a"]
    assert engine.reload.kept == [["running"]]
    engine.turns(20)
    assert engine.tokens("running") == 9
    assert engine.finished() == {"running": "length", "held": "length"}
    assert engine.replies()[call]["success"] != is_broken
    assert is_broken or engine.replies()[call]["seconds"]["held"] > 0
    assert engine.states() == ["queued", "draining", "idle"]


def test_what_the_step_in_flight_ends_is_not_kept(either: Engine) -> None:
    either.submit("running", tokens=3)
    either.turns(2 + either.overlap)
    reload(either, mode="keep")
    either.turns()
    assert either.reload.kept == [["running"]] if not either.overlap else either.reload.kept == [[]]
    assert either.finished() == {"running": "length"}
    assert either.tokens("running") == 3


def test_a_kept_request_can_be_aborted(either: Engine) -> None:
    either.submit("running", tokens=50)
    either.turns(3)
    pause(either, "keep")
    reload(either, mode="keep")
    either.turns()
    either.control.publish(either.scheduler.abort("running"))
    resume(either)
    either.turns()
    assert either.reload.kept == [["running"]]
    assert either.finished() == {"running": "abort"}
    assert either.scheduler.drained and either.scheduler.loads(False).used_blocks == 0


def test_pause_keep_holds_running_requests_until_continue(either: Engine) -> None:
    either.submit("running", tokens=9)
    either.turns(3)
    call = pause(either, "keep")
    either.submit("held")
    either.turns()
    had = either.tokens("running")
    assert either.replies()[call] == {"success": True, "message": "paused; 1 running request(s) are held"}
    assert either.control.loads().held and not either.finished() and had < 9
    resume(either)
    assert not either.control.loads().held
    either.turns(20)
    assert either.finished() == {"running": "length", "held": "length"}
    assert either.tokens("running") == 9


@pytest.mark.parametrize("first", [reload, pause], ids=["reload first", "pause first"])
def test_a_reload_that_waits_is_one_that_keeps_while_a_pause_does(either: Engine, first: Any) -> None:
    either.submit("running", tokens=9)
    either.turns(3)
    if first is reload:
        call = reload(either)
        either.turn()
        pause(either, "keep")
    else:
        pause(either, "keep")
        call = reload(either)
    either.submit("held")
    either.turns()
    assert either.replies()[call]["success"]
    assert either.reload.kept == [["running"]]
    assert not either.finished() and either.control.loads().paused
    resume(either)
    either.turns(20)
    assert either.finished() == {"running": "length", "held": "length"}


def test_a_pause_that_waits_is_done_when_a_later_one_keeps(either: Engine) -> None:
    either.submit("running", tokens=9)
    either.turns(2)
    calls = [pause(either), pause(either, "keep")]
    either.turns()
    assert all(either.replies()[call]["success"] for call in calls)
    assert not either.finished()


def test_a_pause_that_waits_lets_finish_what_an_earlier_one_keeps(either: Engine) -> None:
    either.submit("running", tokens=9)
    either.turns(2)
    pause(either, "keep")
    either.turns(3)
    call = pause(either)
    either.turns(20)
    assert either.replies()[call] == {"success": True, "message": "paused"}
    assert either.finished() == {"running": "length"}


def test_a_reload_that_costs_the_ranks_is_answered_before_they_go(engine: Engine) -> None:
    engine.reload.costly.add("a")
    call = reload(engine)
    with pytest.raises(CostRanks, match="rank 0 cannot use its device after a reload that failed with: out of bounds"):
        engine.turns()
    assert engine.replies()[call]["error"] == "out of bounds"
    # What runs is given to other ranks, which no request is to blame for.
    assert engine.states()[-1] == "draining"


def test_continue_cancels_a_reload_that_keeps(either: Engine) -> None:
    either.submit("running", tokens=9)
    either.turns(2)
    first, second = reload(either, "a", mode="keep"), reload(either, "b", mode="keep")
    for directive in either.control.decide():
        assert isinstance(directive, Begin)
        either.control.begin(directive)
    resume(either)
    either.turns(20)
    assert [either.replies()[call]["code"] for call in (first, second)] == ["cancelled"] * 2
    assert either.reload.ran == [] and either.finished() == {"running": "length"}


def test_requests_go_on_between_two_reloads_that_keep_them(either: Engine) -> None:
    either.submit("running", tokens=30)
    either.turns(2)
    calls = [reload(either, name, mode="keep") for name in "ab"]
    either.turns(40)
    assert either.reload.kept == [["running"]] * 2
    assert all(either.replies()[call]["success"] for call in calls)
    assert either.tokens("running") == 30


def test_without_the_flag_a_reload_is_refused_and_nothing_held(engine: Engine) -> None:
    control = ControlQueue(engine.scheduler, engine.outbox, None)  # type: ignore[arg-type]
    control.add(Reload(call=1, id="a"))
    assert engine.replies()[1]["code"] == "not_enabled"
    assert engine.scheduler.admission_open
