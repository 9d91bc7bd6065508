"""From requests to batches: continuous batching with chunked prefill, a prefix cache and preemption."""

from __future__ import annotations

from collections import OrderedDict, deque

from tokenspeed.runtime.cache.manager import KVCacheManager
from tokenspeed.runtime.protocol.reports import FinishReason, RequestOutput
from tokenspeed.runtime.protocol.state import FIRST_WEIGHT_VERSION, Loads
from tokenspeed.runtime.scheduler.batch import UNKNOWN_ID, Batch, BatchBuilder, Row, StepLogprobs
from tokenspeed.runtime.scheduler.counters import Counters
from tokenspeed.runtime.scheduler.limits import SchedulerLimits
from tokenspeed.runtime.scheduler.logprobs import by_request, with_logprobs
from tokenspeed.runtime.scheduler.request import Request, RequestState


class Scheduler:
    """Decides which tokens of which requests each step computes.

    It knows no device, no clock and no chance: the same calls give the same batches on every rank.

    Every step has one token budget. Running requests that decode come first, then unfinished prefills, then
    requests that are admitted; each group in order of arrival, and nobody is overtaken. Admission takes the
    blocks of all tokens known so far, so only decode can run out of blocks. Then the youngest running request
    is preempted: it gives its blocks back, and prefills prompt and answer so far again before any waiting
    request is admitted.

    One step may be in flight: `schedule` may be called again before the last batch is committed. A request
    that ends meanwhile keeps its blocks until its last batch is committed, and the row there is ignored.

    A request whose tokens depend on those before (`needs_history`) sits out the steps that are planned while its
    last token is in flight. One that wants log-probabilities of its prompt computes all of it, cached or not.

    A request that fills `max_model_len` or the whole KV cache, whichever is smaller, ends with reason
    "length". `RequestOutput.cached_tokens` is set in every output of a request.
    """

    def __init__(self, limits: SchedulerLimits, cache: KVCacheManager) -> None:
        if limits.block_size != cache.block_size:
            raise ValueError(f"block size is {limits.block_size} here and {cache.block_size} in the KV cache")
        self.limits = limits
        self.cache = cache
        self.admission_open = True
        """False holds the waiting requests; preempted ones still return."""
        self.holds_running = False
        """True holds all requests where they are: nothing is scheduled."""
        # Running, then preempted, then waiting requests are in order of arrival at all times.
        self._running: list[Request] = []
        self._preempted: deque[Request] = deque()
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._live: dict[str, Request] = {}
        self._uncommitted: deque[Batch] = deque()
        self._waiting_tokens = 0
        self._counters = Counters()
        self._admitted: list[str] = []
        self._generation = 0
        self._weight_version = FIRST_WEIGHT_VERSION

    @property
    def max_len(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return min(self.limits.max_model_len, self.cache.max_tokens)

    @property
    def drained(self) -> bool:
        """Whether nothing is running, preempted or in flight."""
        return not (self._running or self._preempted or self._uncommitted)

    @property
    def in_flight(self) -> bool:
        """Whether a step is uncommitted."""
        return bool(self._uncommitted)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` could return a batch; it surely does when no step is in flight."""
        if self.holds_running:
            return False
        return bool(self._running or self._preempted or (self._waiting and self.admission_open))

    def submit(self, request: Request) -> list[RequestOutput]:
        """Queue a request.

        Returns:
            Nothing, or the only output of a request that has nothing to compute or can never be computed.

        Raises:
            ValueError: when a live request has this id.
        """
        if request.request_id in self._live:
            raise ValueError(f"request {request.request_id!r} is already being served")
        num_tokens = len(request.prompt)
        if not num_tokens:
            return [self._refusal(request, "the prompt is empty; send at least one token")]
        if num_tokens > self.max_len:
            hint = f"the prompt has {num_tokens} tokens, more than the {self.max_len} that fit; shorten it"
            return [self._refusal(request, hint)]
        request.bind(self.limits.eos_token_ids, self.max_len)
        if request.sampling.max_new_tokens < 1 or (
            request.generated and len(request.token_ids) >= request.length_limit
        ):
            request.state = RequestState.FINISHED
            return [RequestOutput(request_id=request.request_id, token_ids=[], finish_reason="length")]
        self._live[request.request_id] = request
        if request.admitted:
            request.state = RequestState.PREEMPTED
            self._preempted.append(request)
        else:
            self._waiting[request.request_id] = request
            self._waiting_tokens += len(request.token_ids)
        return []

    def refuse(self, request_id: str, error: str) -> list[RequestOutput]:
        """The only output of a request that cannot be begun."""
        return [RequestOutput(request_id=request_id, token_ids=[], finish_reason="error", error=error)]

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request wherever it is; nothing happens when the id is unknown."""
        request = self._live.get(request_id)
        if request is None:
            return []
        if request.state is RequestState.WAITING:
            del self._waiting[request_id]
            self._waiting_tokens -= len(request.token_ids)
        elif request.state is RequestState.PREEMPTED:
            self._preempted.remove(request)
        else:
            self._running.remove(request)
        return [self._finish(request, "abort")]

    def abort_running(self) -> list[RequestOutput]:
        """End every request that was ever admitted; waiting ones stay."""
        admitted = [*self._running, *self._preempted]
        self._running.clear()
        self._preempted.clear()
        return [self._finish(request, "abort") for request in admitted]

    def schedule(self) -> Batch | None:
        """The next step, or None when there is nothing to compute before the step in flight is committed.

        Raises:
            RuntimeError: when two steps are uncommitted already.
        """
        if len(self._uncommitted) > 1:
            raise RuntimeError("commit the oldest step before scheduling a third one")
        if self.holds_running:
            return None
        step = BatchBuilder(self.limits.max_num_batched_tokens)
        self._schedule_decodes(step)
        self._schedule_prefills(step)
        self._admit(step)
        batch = step.build()
        if batch is not None:
            self._uncommitted.append(batch)
            self._counters.steps += 1
            self._counters.step_tokens += batch.num_tokens
        return batch

    def take_admitted(self) -> list[str]:
        """The requests that were admitted for the first time since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted

    @property
    def running_ids(self) -> list[str]:
        """The requests that were admitted and have not ended."""
        return [request.request_id for request in (*self._running, *self._preempted)]

    def commit(self, batch: Batch, token_ids: list[int], logprobs: StepLogprobs | None = None) -> list[RequestOutput]:
        """Take the result of the oldest uncommitted step: an id for each row that samples, in row order.

        Raises:
            RuntimeError: when `batch` is not the oldest uncommitted step.
            ValueError: when the number of ids is not `batch.num_samples`.
        """
        if len(token_ids) != batch.num_samples:
            raise ValueError(f"the step samples {batch.num_samples} ids, not {len(token_ids)}")
        self._take(batch)
        outputs: list[RequestOutput] = []
        num_live = len(self._live)
        finished = RequestState.FINISHED
        block_size = self.limits.block_size
        sampled = iter(token_ids)
        wanted = by_request(batch, logprobs)
        for row in batch.rows:
            request = row.request
            request.in_flight -= 1
            token_id = next(sampled) if row.samples else UNKNOWN_ID
            if request.state is finished:
                if not request.in_flight:
                    self.cache.release(request.table)
                continue
            end = row.start + row.count
            if end >= (request.table.num_published + 1) * block_size:
                self.cache.publish(request.table, request.token_ids, end)
            if row.samples:
                output = self._accept(request, token_id)
                if wanted or request.prompt_logprobs is not None:
                    output = with_logprobs(output, request, wanted.get(request.request_id))
                outputs.append(output)
        if len(self._live) < num_live:
            self._running = [request for request in self._running if request.state is not finished]
        return outputs

    def fail(self, batch: Batch, error: str) -> list[RequestOutput]:
        """Give up the oldest uncommitted step: its requests end with `error`, and nothing that it wrote is found again.

        Raises:
            RuntimeError: when `batch` is not the oldest uncommitted step.
        """
        self._take(batch)
        outputs: list[RequestOutput] = []
        for row in batch.rows:
            request = row.request
            request.in_flight -= 1
            if request.state is RequestState.RUNNING:
                self._running.remove(request)
                outputs.append(self._finish(request, "error", error=error))
            elif not request.in_flight:
                self.cache.release(request.table)
        return outputs

    def recompute_running(self) -> int:
        """Take the blocks of all running requests: each prefills prompt and answer so far again, as after a preemption.

        Returns:
            How many requests go on so, those included that were preempted before.

        Raises:
            RuntimeError: when a step is in flight.
        """
        if self._uncommitted:
            raise RuntimeError("commit the step in flight before its requests give their blocks back")
        while self._running:
            self._set_back_youngest()
        return len(self._preempted)

    def flush_cache(self) -> None:
        """Let no KV computed so far be found again. Running requests keep their blocks."""
        self.cache.flush()

    def reseed_cache(self, generation: int, weight_version: str) -> None:
        """`flush_cache`, and seed the index with the generation and weight version that compute next."""
        self.cache.reseed(generation, weight_version)
        self._generation, self._weight_version = generation, weight_version

    def loads(self, paused: bool, held: bool = False) -> Loads:
        """What is held now, and how a pause is told. Preempted requests count as waiting, with all they prefill."""
        return Loads(
            running=len(self._running),
            waiting=len(self._waiting) + len(self._preempted),
            waiting_tokens=self._waiting_tokens + sum(len(request.token_ids) for request in self._preempted),
            used_blocks=self.cache.used_blocks,
            cached_blocks=self.cache.cached_blocks,
            total_blocks=self.cache.num_blocks,
            **vars(self._counters),
            paused=paused,
            held=held,
            generation=self._generation,
            weight_version=self._weight_version,
        )

    def _schedule_decodes(self, step: BatchBuilder) -> None:
        """Add one row for each running request that has one token to compute. This is the hot loop."""
        block_size = self.limits.block_size
        budget = step.budget
        rows = step.decode_rows
        # A victim of preemption leaves the list from its end, which is never before the present request.
        for request in self._running:
            if len(rows) == budget:
                break
            start = request.num_scheduled
            known = request.token_ids
            num_known = len(known)
            if start < num_known - 1 or request is step.held_back:
                continue
            end = start + 1
            if start < num_known:
                ids, source = [known[start]], None
            elif end < request.length_limit and not request.sampling.needs_history:
                ids, source = [UNKNOWN_ID], request.row
            else:
                continue  # the step in flight samples its last token, or one that the next depends on
            if start >= len(request.table.blocks) * block_size and not self._make_room(request, step):
                continue
            forbidden = request.stop_ids if end < request.stops_from else ()
            rows.append(Row(request, start, 1, True, ids, source, request.table.blocks, forbidden))
            request.num_scheduled = end
            request.in_flight += 1
        step.budget -= len(rows)
        step.num_tokens += len(rows)

    def _schedule_prefills(self, step: BatchBuilder) -> None:
        """Continue the prefills that earlier steps left unfinished; their blocks were taken at admission."""
        for request in self._running:
            if not step.budget:
                break
            if request.num_scheduled < len(request.token_ids) - 1 and request is not step.held_back:
                step.add_chunk(request)

    def _admit(self, step: BatchBuilder) -> None:
        """Start requests while tokens, seats and blocks last: preempted ones, then waiting ones."""
        while step.budget and len(self._running) < self.limits.max_num_seqs:
            if self._preempted:
                request = self._preempted[0]
            elif self._waiting and self.admission_open:
                request = next(iter(self._waiting.values()))
            else:
                return
            if self._shares_what_is_computed(request):
                return
            # A little room lets the running ones grow, or else the newcomer is soon preempted.
            headroom = self.cache.num_blocks // 100 if self._running else 0
            reuse = request.prompt_logprobs is None
            num_found = self.cache.admit(request.table, request.token_ids, headroom, reuse)
            if num_found is None:
                return
            if request.state is RequestState.PREEMPTED:
                self._preempted.popleft()
            else:
                self._leave_waiting(request)
            if not request.started:
                self._start(request, num_found)
            request.state = RequestState.RUNNING
            request.num_scheduled = num_found
            self._running.append(request)
            step.add_chunk(request)

    def _shares_what_is_computed(self, request: Request) -> bool:
        """Whether a running request is just computing the prompt that this one could find in the prefix index."""
        leader = self._live.get(request.shares_prompt_with or "")
        if leader is None or leader.state is not RequestState.RUNNING or not self.cache.enable_prefix_caching:
            return False
        return leader.table.num_published < (len(leader.prompt) - 1) // self.limits.block_size

    def _leave_waiting(self, request: Request) -> None:
        del self._waiting[request.request_id]
        self._waiting_tokens -= len(request.token_ids)

    def _start(self, request: Request, num_found: int) -> None:
        """Note the first admission of a request."""
        request.started = True
        if not request.generated:
            request.cached_tokens = num_found
        self._admitted.append(request.request_id)
        if self.cache.enable_prefix_caching:
            self._counters.prefix_queried_tokens += len(request.token_ids)
            self._counters.prefix_hit_tokens += num_found

    def _make_room(self, request: Request, step: BatchBuilder) -> bool:
        """Give the request one more block, preempting from the youngest on; False when it has to wait.

        A victim that is in flight is held back instead, since the device may still write to its blocks: it
        is preempted in the next step, unless the commits until then bring enough blocks.
        """
        while not self.cache.grow(request.table):
            victim = self._running[-1]
            if victim.in_flight:
                step.held_back = victim
                return False
            self._set_back_youngest()
            self._counters.preemptions += 1
            if victim is request:
                return False
        return True

    def _set_back_youngest(self) -> None:
        """Let the youngest running request give its blocks back and begin anew, ahead of all that wait."""
        request = self._running.pop()
        self.cache.release(request.table)
        request.state = RequestState.PREEMPTED
        request.num_scheduled = 0
        self._preempted.appendleft(request)

    def _accept(self, request: Request, token_id: int) -> RequestOutput:
        """Append a sampled id, or end the request by it."""
        if token_id in request.stop_ids:
            return self._finish(request, "stop", matched_stop=token_id)
        if request.grammar is not None and not request.grammar.accept(token_id):
            error = f"the sampler chose token {token_id}, which the grammar does not permit"
            return self._finish(request, "error", error=error)
        request.append(token_id)
        if len(request.token_ids) >= request.length_limit:
            return self._finish(request, "length", token_id)
        return RequestOutput(request_id=request.request_id, token_ids=[token_id], cached_tokens=request.cached_tokens)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        last_token: int | None = None,
        matched_stop: int | None = None,
        error: str = "",
    ) -> RequestOutput:
        """End a request that was taken from its queue, or that `commit` is about to take from it."""
        request.state = RequestState.FINISHED
        del self._live[request.request_id]
        if not request.in_flight:
            self.cache.release(request.table)
        return RequestOutput(
            request_id=request.request_id,
            token_ids=[] if last_token is None else [last_token],
            finish_reason=reason,
            matched_stop=matched_stop,
            cached_tokens=request.cached_tokens,
            error=error,
        )

    def _take(self, batch: Batch) -> None:
        if not self._uncommitted or self._uncommitted[0] is not batch:
            raise RuntimeError("steps are committed once each, in the order in which they were scheduled")
        self._uncommitted.popleft()

    def _refusal(self, request: Request, error: str) -> RequestOutput:
        request.state = RequestState.FINISHED
        return RequestOutput(request_id=request.request_id, token_ids=[], finish_reason="error", error=error)
