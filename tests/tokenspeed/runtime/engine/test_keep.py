"""Requests that run while the code changes: held, computed anew or not, and answered as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine import InProcessEngine
from tests.tiny import tiny_llama
from tests.tokenspeed.runtime.engine.test_overlap import requests
from tokenspeed.runtime.config import CacheOptions, Config, GraphOptions, ModelOptions, SchedulerOptions
from tokenspeed.runtime.protocol.calls import Reload, Submit
from tokenspeed.runtime.protocol.reports import CallReply, Outputs, RequestOutput, TokenLogprobs
from tokenspeed.runtime.protocol.sampling import SamplingParams

Answer = tuple[list[int], str | None, int | None, list[TokenLogprobs], list[Any]]
"""Ids, how it ended, log-probabilities, and the lists of those of the prompt."""


class SameCode:
    """Stands for a transaction whose edit changes no number: all of it runs, and is kept or dropped.

    With `changes` False there is nothing to run, which is found before anything is held.
    """

    def __init__(self, engine: InProcessEngine, *, changes: bool, commits: bool) -> None:
        self.engine = engine
        self.changes = changes
        self.commits = commits
        self.kept: list[int] = []
        """How many requests ran at each reload."""
        self.code = self

    @property
    def generation(self) -> int:
        return self.engine.executor.generation.number

    def tell_imports(self) -> None:
        """Nothing is imported meanwhile."""

    def settle_early(self, call: Reload) -> dict[str, Any] | None:
        return None if self.changes else {"success": True, "id": call.id, "modules": []}

    def run(self, call: Reload, drained_after: float) -> dict[str, Any]:
        executor, scheduler = self.engine.executor, self.engine.scheduler
        executor.warm(lambda _: None)
        generation = executor.capture(self.generation + 1, lambda _: None)
        self.kept.append(len(scheduler.running_ids))
        body = {"success": self.commits, "id": call.id, "modules": ["m"], "seconds": {}}
        if self.commits:
            executor.install(generation)
            scheduler.recompute_running()
            scheduler.reseed_cache(generation.number, "v")
        return body


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["graphs", "overlap"])
def engine(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> InProcessEngine:
    """One whose cache holds about half of what the requests would fill."""
    config = Config(
        model=ModelOptions(model=str(model), device="cpu", max_model_len=128),
        scheduler=SchedulerOptions(max_num_seqs=6, max_num_batched_tokens=24),
        cache=CacheOptions(max_total_tokens=160, block_size=4),
        graphs=GraphOptions(cpu_graphs=True, cudagraph_capture_sizes=(2, 4), prefill_graph_max_tokens=16),
    )
    made = InProcessEngine(config, tmp_path_factory.mktemp("run"), overlap=request.param == "overlap").start()
    if request.param == "overlap":
        made.executor.sample_on_device = True
        made.executor.generation = made.executor.capture(1, lambda _: None)
    return made


def submits() -> list[Submit]:
    """Every kind of sampling, log-probabilities of long prompts, and several answers to one prompt."""
    made = requests(3, count=10)
    told = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True, prompt_logprobs=2, logprobs=1)
    made += [Submit(request_id=f"told{i}", prompt=[*range(7 + i, 67)], sampling=told) for i in range(2)]
    for index in range(3):
        sampling = SamplingParams(max_new_tokens=14, temperature=1.0, seed=index, ignore_eos=True)
        leader = None if not index else "n0"
        made.append(Submit(request_id=f"n{index}", prompt=[*range(50)], sampling=sampling, shares_prompt_with=leader))
    return made


def drive(
    engine: InProcessEngine, every: int, *, changes: bool = True, commits: bool = True
) -> tuple[dict[str, Answer], SameCode]:
    """Let the requests arrive over several steps, with a reload in every so many turns."""
    engine.outbox.sent.clear()
    engine.scheduler.flush_cache()
    reload = SameCode(engine, changes=changes, commits=commits)
    engine.control.reload = reload  # type: ignore[assignment]
    loop, waiting = engine.loop(), submits()
    for turn in range(400):
        if waiting and turn % 2 == 0:
            engine.stream.messages.append(waiting.pop(0))
        elif not waiting and engine.scheduler.drained and not engine.scheduler.loads(paused=False).waiting:
            break
        if turn % every == every - 1:
            engine.stream.messages.append(Reload(call=turn, id=str(turn), mode="keep"))
        assert loop.turn()
    else:
        raise AssertionError("the engine makes no progress")
    assert engine.scheduler.loads(paused=False).used_blocks == 0
    assert changes == (max(reload.kept, default=0) > 2)
    return {name: answer(found) for name, found in outputs(engine).items()}, reload


def outputs(engine: InProcessEngine) -> dict[str, list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {}
    for message in engine.outbox.sent:
        for output in message.outputs if isinstance(message, Outputs) else ():
            found.setdefault(output.request_id, []).append(output)
    return found


def answer(found: list[RequestOutput]) -> Answer:
    ids = [token_id for output in found for token_id in output.token_ids]
    logprobs = [entry for output in found for entry in output.logprobs]
    prompts = [output.prompt_logprobs for output in found if output.prompt_logprobs is not None]
    return ids, found[-1].finish_reason, found[-1].matched_stop, logprobs, prompts


@pytest.mark.parametrize(("every", "commits"), [(6, False), (17, True)], ids=["undone", "committed"])
def test_answers_are_what_they_would_have_been(engine: InProcessEngine, every: int, commits: bool) -> None:
    before = engine.scheduler.loads(paused=False).preemptions
    expected, _ = drive(engine, every, changes=False)
    assert engine.scheduler.loads(paused=False).preemptions > before
    found, reload = drive(engine, every, commits=commits)
    replies = [message.body for message in engine.outbox.sent if isinstance(message, CallReply)]
    assert len(replies) >= len(reload.kept) and {reply["success"] for reply in replies} == {commits}
    if commits or engine.overlap:  # the step in flight is waited for, so that others share the next one
        check_close(found, expected)
    else:
        assert found == expected


def check_close(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    """The same ids and ends, each token's log-probabilities once, and those of the prompt once."""
    assert found.keys() == expected.keys()
    for name, (ids, reason, matched, logprobs, prompts) in found.items():
        wanted = expected[name]
        assert (ids, reason, matched) == wanted[:3], name
        for told, told_before in ((logprobs, wanted[3]), (prompts, wanted[4])):
            assert flat(told) == pytest.approx(flat(told_before), abs=1e-4), name


def flat(told: Any) -> list[float]:
    """All numbers in the order in which they were told, None as one as well."""
    if told is None:
        return [7.0]
    if isinstance(told, TokenLogprobs):
        return flat(msgspec.structs.astuple(told))
    return [float(told)] if isinstance(told, int | float) else [number for part in told for number in flat(part)]
