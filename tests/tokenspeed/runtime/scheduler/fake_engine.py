"""A scheduler joined to the fake device, with the rules that every step and every output has to keep."""

from __future__ import annotations

from typing import Any

from tokenspeed.runtime.cache.manager import BlockTable, KVCacheManager
from tokenspeed.runtime.protocol.reports import RequestOutput
from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.runtime.scheduler.batch import Batch
from tokenspeed.runtime.scheduler.limits import SchedulerLimits
from tokenspeed.runtime.scheduler.request import Request, RequestState
from tokenspeed.runtime.scheduler.scheduler import Scheduler

from .fake_device import EOS, FakeDevice, reference, reference_logprobs

MAX_STEPS = 5_000
BROKEN = "the step broke"


class FakeEngine:
    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 64,
        prefix_caching: bool = True,
    ) -> None:
        self.limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            eos_token_ids=(EOS,),
        )
        self.num_blocks = num_blocks
        self.prefix_caching = prefix_caching
        self._begin()
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.admitted: list[str] = []
        """Ids in order of first admission."""
        self.resubmitted: set[str] = set()

    def _begin(self) -> None:
        size = self.limits.block_size
        self.scheduler = Scheduler(self.limits, KVCacheManager(self.num_blocks, size, self.prefix_caching))
        self.device = FakeDevice(self.num_blocks, size)

    # ---- what an engine loop does ----

    def submit(
        self, prompt: list[int], request_id: str | None = None, shares_prompt_with: str | None = None, **sampling: Any
    ) -> Request:
        params = SamplingParams(**{"max_new_tokens": 8, **sampling})
        request = Request(request_id or f"r{len(self.requests)}", prompt, params, shares_prompt_with)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        self._take(self.scheduler.submit(request))
        return request

    def replace(self) -> None:
        """The ranks are lost: fresh ones get the requests that have not ended, with their tokens so far."""
        self._begin()
        for request_id, old in self.requests.items():
            old.table = BlockTable()
            if self.finish_reason(old) is None:
                self.resubmitted.add(request_id)
                request = self.requests[request_id] = Request(
                    request_id,
                    old.prompt,
                    old.sampling,
                    old.shares_prompt_with,
                    generated=self.tokens(old),
                    admitted=old.admitted or old.started,
                )
                self._take(self.scheduler.submit(request))

    def abort(self, request_id: str) -> None:
        self._take(self.scheduler.abort(request_id))

    def abort_running(self) -> None:
        self._take(self.scheduler.abort_running())

    def flush(self) -> None:
        self.scheduler.flush_cache()
        self.device.epoch += 1

    def reseed(self, generation: int, weight_version: str = "") -> None:
        self.scheduler.reseed_cache(generation, weight_version)
        self.device.epoch += 1

    def recompute_running(self) -> None:
        """Other code computes from now on, and what runs goes on with it."""
        running = [r for r in self.requests.values() if r.state in (RequestState.RUNNING, RequestState.PREEMPTED)]
        assert self.scheduler.recompute_running() == len(running)
        assert self.scheduler.loads(paused=False).used_blocks == 0

    def launch(self) -> Batch | None:
        idle, has_work = not self.device.pending, self.scheduler.has_work
        batch = self.scheduler.schedule()
        if batch is None:
            assert not (idle and has_work), "work, but nothing scheduled and nothing in flight"
            return None
        assert has_work
        self._check_batch(batch)
        self.device.run(batch)
        return batch

    def commit(self) -> list[RequestOutput]:
        outputs = self.scheduler.commit(*self.device.finish())
        self._take(outputs)
        self.check()
        return outputs

    def fail(self) -> list[RequestOutput]:
        """The oldest step in flight breaks on the device."""
        batch, *_ = self.device.finish()
        outputs = self.scheduler.fail(batch, BROKEN)
        self._take(outputs)
        self.check()
        return outputs

    def step(self) -> Batch | None:
        """One step without overlap."""
        batch = self.launch()
        if batch is not None:
            self.commit()
        return batch

    def run(self, *, overlap: bool = False) -> None:
        """Go on until nothing can be scheduled any more and nothing is in flight."""
        for _ in range(MAX_STEPS):
            launched = self.launch()
            if self.device.pending and (launched is None or not overlap or len(self.device.pending) > 1):
                self.commit()
            elif launched is None:
                return
        raise AssertionError("the scheduler makes no progress")

    # ---- rules ----

    def tokens(self, request: Request) -> list[int]:
        return [token for output in self.outputs[request.request_id] for token in output.token_ids]

    def finish_reason(self, request: Request) -> str | None:
        outputs = self.outputs[request.request_id]
        return outputs[-1].finish_reason if outputs else None

    def check(self) -> None:
        """Blocks in use are those of the tables, and nobody was overtaken."""
        tables = [request.table.blocks for request in self.requests.values()]
        held = {block for blocks in tables for block in blocks}
        loads = self.scheduler.loads(paused=False)
        assert loads.used_blocks == len(held)
        assert loads.used_blocks + loads.cached_blocks <= loads.total_blocks
        states = [request.state for request in self.requests.values()]
        live = [state for state in states if state is not RequestState.FINISHED]
        order = [RequestState.RUNNING, RequestState.PREEMPTED, RequestState.WAITING]
        assert live == sorted(live, key=order.index)
        assert loads.running == live.count(RequestState.RUNNING)
        assert loads.waiting == len(live) - loads.running
        backlog = [r for r in self.requests.values() if r.state in order[1:]]
        assert loads.waiting_tokens == sum(len(request.token_ids) for request in backlog)

    def check_ended(self) -> None:
        """Every request ended, rightly, and gave everything back."""
        for request in self.requests.values():
            outputs = self.outputs[request.request_id]
            assert outputs and outputs[-1].finish_reason is not None, "a request was lost"
            self._check_answer(request, outputs[-1])
            self._check_logprobs(request)
            if request.request_id in self.admitted and request.request_id not in self.resubmitted:
                assert {output.cached_tokens for output in outputs} == {request.cached_tokens}
                assert request.cached_tokens < len(request.prompt)
        assert self.scheduler.drained
        assert self.scheduler.loads(paused=False).used_blocks == 0

    def _check_answer(self, request: Request, last: RequestOutput) -> None:
        if last.finish_reason == "error" and last.error != BROKEN:
            assert len(request.prompt) > self.scheduler.max_len
            return
        expected, reason, matched = reference(request.prompt, request.sampling, self.scheduler.max_len)
        answer = self.tokens(request)
        if last.finish_reason in ("abort", "error"):
            assert answer == expected[: len(answer)]
        else:
            assert (answer, last.finish_reason, last.matched_stop) == (expected, reason, matched)

    def _check_logprobs(self, request: Request) -> None:
        """Each token that was sent came with what the model said before it; the prompt's came once, at the start."""
        outputs = self.outputs[request.request_id]
        top = request.sampling.logprobs
        sent = [entry for output in outputs for entry in output.logprobs]
        answer = self.tokens(request)
        count = len(answer) + (outputs[-1].matched_stop is not None)
        known = reference_logprobs(request.prompt + answer, top or 0)[len(request.prompt) - 1 :]
        assert sent == ([] if top is None else known[:count])
        prompt_top = request.sampling.prompt_logprobs
        told = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
        if prompt_top is None or not count:
            assert told == []
        else:
            assert told == [[None, *reference_logprobs(request.prompt, prompt_top)[:-1]]]
            assert outputs[0].prompt_logprobs is not None
            assert request.cached_tokens == 0

    def _check_batch(self, batch: Batch) -> None:
        rows = batch.rows
        assert batch.num_tokens == sum(row.count for row in rows) <= self.limits.max_num_batched_tokens
        assert 0 < len(rows) <= self.limits.max_num_seqs
        assert len({row.request.request_id for row in rows}) == len(rows)
        assert batch.num_samples == sum(row.samples for row in rows)
        decodes = [row.count == 1 and row.samples for row in rows]
        assert decodes == sorted(decodes, reverse=True)
        assert batch.num_decode_rows == sum(decodes)
        assert batch.is_decode == all(decodes)
        for row in rows:
            assert row.count == len(row.token_ids) > 0
            assert row.start + row.count <= self.scheduler.max_len
            assert row.request.state is RequestState.RUNNING
        known = set(self.admitted)
        new = [r for r in self.requests if r not in known and any(r == x.request.request_id for x in rows)]
        self.admitted += new

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            earlier = self.outputs[output.request_id]
            assert not earlier or earlier[-1].finish_reason is None, "an output after the last one"
            earlier.append(output)
