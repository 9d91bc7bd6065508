"""Many requests on little memory, with the overlap that a GPU has."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from tests.engine import InProcessEngine
from tokenspeed.runtime.config import CacheOptions, SchedulerOptions
from tokenspeed.runtime.protocol.calls import Abort, Submit
from tokenspeed.runtime.protocol.reports import Outputs
from tokenspeed.runtime.protocol.sampling import SamplingParams


def test_300_requests_under_memory_pressure(start: Callable[..., InProcessEngine], tiny: Callable[..., Path]) -> None:
    engine = start(
        tiny(),
        model_options={"max_model_len": 512},
        scheduler=SchedulerOptions(max_num_seqs=64, max_num_batched_tokens=256),
        cache=CacheOptions(max_total_tokens=4096),
    )
    chance = random.Random(1)
    wanted: dict[str, int] = {}
    aborted = set()
    loop = engine.loop()
    for index in range(300):
        name, length = f"r{index}", chance.randint(1, 120)
        sampling = SamplingParams(
            max_new_tokens=length,
            temperature=chance.choice((0.0, 0.7)),
            seed=index,
            ignore_eos=True,
            repetition_penalty=chance.choice((1.0, 1.0, 1.0, 1.2)),
            logprobs=chance.choice((None, None, None, 1)),
        )
        prompt = [chance.randrange(1, 1000) for _ in range(chance.randint(1, 200))]
        engine.stream.messages.append(Submit(request_id=name, prompt=prompt, sampling=sampling))
        wanted[name] = length
        if chance.random() < 0.1:
            aborted.add(name)
            engine.stream.messages.append(Abort(request_id=f"r{chance.randrange(index + 1)}"))
        if index % 3 == 0:
            assert loop.turn()
    while loop.turn():
        pass
    lengths: dict[str, int] = dict.fromkeys(wanted, 0)
    reasons: dict[str, str] = {}
    for message in engine.outbox.sent:
        for output in message.outputs if isinstance(message, Outputs) else ():
            assert output.request_id not in reasons, "an output after the last one"
            lengths[output.request_id] += len(output.token_ids)
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
    assert set(reasons) == set(wanted)
    assert set(reasons.values()) <= {"length", "abort"}
    assert all(lengths[name] == wanted[name] for name, reason in reasons.items() if reason == "length")
    assert engine.scheduler.loads(paused=False).preemptions > 0
    assert engine.scheduler.loads(paused=False).used_blocks == 0
    assert engine.scheduler.drained
