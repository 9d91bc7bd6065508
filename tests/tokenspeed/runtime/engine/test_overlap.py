"""One step in flight while the next is prepared gives what step after step gives, whatever the requests ask for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine import InProcessEngine
from tests.tiny import tiny_llama
from tokenspeed.runtime.config import CacheOptions, Config, GraphOptions, ModelOptions, SchedulerOptions
from tokenspeed.runtime.execution.pending import PendingStep
from tokenspeed.runtime.protocol.calls import Abort, Continue, DrainMode, FlushCache, Pause, Submit
from tokenspeed.runtime.protocol.message import Message
from tokenspeed.runtime.protocol.reports import CallReply, Outputs, RequestOutput
from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.runtime.scheduler.batch import Batch, StepResult


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


def config(model: Path, graphs: bool, tokens: int = 4096) -> Config:
    return Config(
        model=ModelOptions(model=str(model), device="cpu", max_model_len=128),
        scheduler=SchedulerOptions(max_num_seqs=6, max_num_batched_tokens=32),
        cache=CacheOptions(max_total_tokens=tokens, block_size=4),
        graphs=GraphOptions(
            cpu_graphs=graphs, cudagraph_capture_sizes=(2, 4) if graphs else None, prefill_graph_max_tokens=16
        ),
    )


@pytest.fixture(params=["eager", "graphs", "sampled in graphs"])
def engines(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[list[InProcessEngine]]:
    """The same engine without and with overlap."""
    made = []
    for overlap in (False, True):
        engine = InProcessEngine(config(model, request.param != "eager"), tmp_path, overlap=overlap).start()
        if request.param == "sampled in graphs":
            engine.executor.sample_on_device = True
            engine.executor.generation = engine.executor.capture(1, lambda _: None)
        made.append(engine)
    yield made


def requests(seed: int, count: int = 14) -> list[Submit]:
    """Requests of every kind of sampling, some of which stop at an id."""
    chance = random.Random(seed)
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"temperature": 0.9, "frequency_penalty": 0.7, "logprobs": 2},
        {"temperature": 0.0, "logit_bias": ((5, 3.0),), "logprobs": 0},
        {"temperature": 0.7, "min_new_tokens": 6},
    ]
    made = []
    for index in range(count):
        sampling = SamplingParams(
            max_new_tokens=chance.randint(1, 24),
            seed=chance.getrandbits(64),
            stop_token_ids=tuple(chance.sample(range(49152), 3000)),
            **kinds[index % len(kinds)],  # type: ignore[arg-type]
        )
        prompt = [chance.randrange(49152) for _ in range(chance.randint(1, 40))]
        made.append(Submit(request_id=f"r{index}", prompt=prompt, sampling=sampling))
    return made


def answers(engine: InProcessEngine) -> dict[str, tuple[list[int], RequestOutput]]:
    """All ids and the last output of each request."""
    found: dict[str, tuple[list[int], RequestOutput]] = {}
    for message in engine.outbox.sent:
        for output in message.outputs if isinstance(message, Outputs) else ():
            ids, _ = found.get(output.request_id, ([], output))
            found[output.request_id] = ([*ids, *output.token_ids], output)
    return found


def drive(engine: InProcessEngine, submits: list[Submit], aborts: dict[int, str] | None = None) -> None:
    """Let the requests arrive over several steps, with `aborts` at some of them."""
    engine.outbox.sent.clear()
    loop = engine.loop()
    waiting = list(submits)
    for turn in range(400):
        if waiting and turn % 2 == 0:
            engine.stream.messages.append(waiting.pop(0))
        if aborts and turn in aborts:
            engine.stream.messages.append(Abort(request_id=aborts[turn]))
        if not loop.turn() and not waiting:
            return
    raise AssertionError("the engine makes no progress")


@pytest.mark.parametrize("seed", range(2))
def test_every_kind_of_sampling_gives_the_same_ids(engines: list[InProcessEngine], seed: int) -> None:
    for engine in engines:
        drive(engine, requests(seed))
    plain, overlapped = (answers(engine) for engine in engines)
    assert {name: ids for name, (ids, _) in overlapped.items()} == {name: ids for name, (ids, _) in plain.items()}
    for name, (_, last) in overlapped.items():
        expected = plain[name][1]
        assert (last.finish_reason, last.matched_stop) == (expected.finish_reason, expected.matched_stop)
        told = [(entry.logprob, *entry.top_logprobs) for entry in last.logprobs]
        assert told == [pytest.approx((entry.logprob, *entry.top_logprobs), abs=1e-4) for entry in expected.logprobs]
    assert all(engine.scheduler.drained for engine in engines)
    assert all(engine.scheduler.loads(paused=False).used_blocks == 0 for engine in engines)


def test_an_aborted_request_ends_and_disturbs_no_other(engines: list[InProcessEngine]) -> None:
    submits = [
        Submit(
            request_id=f"r{i}",
            prompt=list(range(10 + i, 30)),
            sampling=SamplingParams(max_new_tokens=40, temperature=0.9, seed=i, ignore_eos=True),
        )
        for i in range(5)
    ]
    for engine in engines:
        drive(engine, submits, aborts={12: "r1", 15: "r3"})
    plain, overlapped = (answers(engine) for engine in engines)
    for name, (ids, last) in overlapped.items():
        aborted = name in ("r1", "r3")
        assert last.finish_reason == ("abort" if aborted else "length")
        shared = min(len(ids), len(plain[name][0]))
        assert ids[:shared] == plain[name][0][:shared]
        assert aborted or len(ids) == 40


def test_requests_outgrow_the_cache(model: Path, tmp_path: Path) -> None:
    outcomes = []
    for overlap in (False, True):
        engine = InProcessEngine(config(model, graphs=False, tokens=140), tmp_path, overlap=overlap).start()
        submits = [
            Submit(
                request_id=f"r{i}",
                prompt=list(range(10 + i, 40)),
                sampling=SamplingParams(max_new_tokens=30, temperature=0.8, seed=i, ignore_eos=True),
            )
            for i in range(6)
        ]
        drive(engine, submits)
        assert engine.scheduler.loads(paused=False).preemptions > 0
        outcomes.append({name: ids for name, (ids, _) in answers(engine).items()})
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_pause_is_answered_when_nothing_is_in_flight_any_more(model: Path, tmp_path: Path, mode: DrainMode) -> None:
    engine = InProcessEngine(config(model, graphs=False), tmp_path, overlap=True).start()
    loop = engine.loop()
    greedy = SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True)
    for index in range(3):
        engine.stream.messages.append(Submit(request_id=f"r{index}", prompt=[7, 8, 9 + index], sampling=greedy))
    for _ in range(4):
        loop.turn()
    engine.outbox.sent.clear()
    engine.stream.messages += [FlushCache(call=1), Pause(call=2, mode=mode)]
    engine.stream.messages.append(Submit(request_id="held", prompt=[1, 2], sampling=greedy))
    while loop.turn():
        pass
    order = [m.call if isinstance(m, CallReply) else "outputs" for m in engine.outbox.sent if is_progress(m)]
    assert order.index(1) < order.index(2) == len(order) - 1, "an output after the answer to the pause"
    assert {last.finish_reason for _, last in answers(engine).values()} == {"length" if mode == "wait" else "abort"}
    assert engine.scheduler.drained and engine.scheduler.loads(paused=True).waiting == 1
    engine.stream.messages.append(Continue(call=3))
    loop = engine.loop()
    while loop.turn():
        pass
    assert len(answers(engine)["held"][0]) == 9


def is_progress(message: Message) -> bool:
    return isinstance(message, CallReply) or (isinstance(message, Outputs) and bool(message.outputs))


@pytest.mark.parametrize("breaks", ["at launch", "on the device"])
def test_a_step_that_fails_ends_its_own_requests_only(
    model: Path, tmp_path: Path, breaks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = InProcessEngine(config(model, graphs=False), tmp_path, overlap=True).start()
    launch = engine.executor.launch

    class Broken(PendingStep):
        def wait(self) -> StepResult:
            raise RuntimeError("the device says no")

    def launch_or_break(batch: Batch) -> PendingStep:
        if not any(13 in row.token_ids for row in batch.rows):
            return launch(batch)
        if breaks == "at launch":
            raise RuntimeError("the host says no")
        launch(batch)
        return Broken(torch.zeros(batch.num_samples, dtype=torch.int64))

    monkeypatch.setattr(engine.executor, "launch", launch_or_break)
    greedy = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    first = Submit(request_id="first", prompt=[5, 6, 7], sampling=SamplingParams(max_new_tokens=1, temperature=0.0))
    drive(engine, [first, Submit(request_id="bad", prompt=[13, 13], sampling=greedy)])
    drive_after = Submit(request_id="after", prompt=[5, 6, 8], sampling=greedy)
    ended = answers(engine)
    assert ended["first"][1].finish_reason == "length"
    assert ended["bad"][1].finish_reason == "error"
    assert "says no" in ended["bad"][1].error
    drive(engine, [drive_after])
    assert len(answers(engine)["after"][0]) == 6
    assert engine.scheduler.drained
