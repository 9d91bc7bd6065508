"""Runs the model on one batch: eagerly, or by replaying a captured step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tokenspeed.errors import ResourceError
from tokenspeed.runtime.cache.pool import KVPool
from tokenspeed.runtime.execution.buffers import BatchBuffers, DeviceInputs
from tokenspeed.runtime.execution.capture_plan import CapturePlan
from tokenspeed.runtime.execution.dummies import DUMMY_SAMPLING, Look, Part, dummy_steps, see_nothing
from tokenspeed.runtime.execution.generation import Generation
from tokenspeed.runtime.execution.graphs.base import Graph, GraphBackend, GraphKind
from tokenspeed.runtime.execution.graphs.triton_modules import KernelModules
from tokenspeed.runtime.execution.inputs import StepShape
from tokenspeed.runtime.execution.pending import PendingStep, WantedLogprobs
from tokenspeed.runtime.execution.ranges import Ranges
from tokenspeed.runtime.models.base import CausalLM
from tokenspeed.runtime.sampling.batch import SamplingBatch, SamplingRow
from tokenspeed.runtime.sampling.logprobs import token_logprobs
from tokenspeed.runtime.sampling.sampler import Sampler
from tokenspeed.runtime.scheduler.batch import Batch, Row, StepResult
from tokenspeed_kernel.ops.sampling import plan_sample, sample
from tokenspeed_kernel.progress import PROGRESS

PROMPT_LOGITS = 256
"""Tokens of a prompt whose logits are in memory at once where their log-probabilities are wanted."""


@dataclass(frozen=True)
class PlannedStep:
    """One step that is captured: the shape of its inputs, what runs it, and the tensors that hold its results."""

    shape: StepShape
    run: Callable[[], None]
    results: list[torch.Tensor]


class DeviceLost(ResourceError):
    """The device does not answer any more; only a new process can use it."""


class Executor:
    """Owns the step: buffers in, token ids out.

    `logits` is float32 [largest decode graph, vocab] and `hidden` [largest prefill bucket, hidden]: captured
    steps leave their results there. `generation` is the set of graphs that serves now. `make_backend` is called
    once for every generation: its graphs share what the backend holds.

    With `sample_on_device` the rows that need no more than temperature, top-k, top-p, min-p and a seed are sampled
    by one kernel, inside the decode graphs; a CPU is faster with the sampler that looks first what the rows need.
    `modules` are the kernels on a GPU.
    """

    def __init__(
        self,
        model: CausalLM,
        sampler: Sampler,
        pool: KVPool,
        buffers: BatchBuffers,
        plan: CapturePlan,
        make_backend: Callable[[], GraphBackend],
        sample_on_device: bool = False,
        ranges: Ranges | None = None,
        modules: KernelModules | None = None,
    ):
        self.model = model
        self.sampler = sampler
        self.pool = pool
        self.buffers = buffers
        self.plan = plan
        self.make_backend = make_backend
        self.sample_on_device = sample_on_device
        self.ranges = ranges or Ranges(False)
        self.modules = modules
        self.generation = Generation(0, {}, {})
        self.dummies = dummy_steps(buffers.limits)
        self.logits = torch.empty(0)
        self.hidden = torch.empty(0)

    def allocate(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        """Make the static outputs of the captured steps."""
        device = self.buffers.device
        rows = self.plan.decode[-1] if self.plan.decode else 0
        self.logits = torch.zeros(rows, vocab_size, dtype=torch.float32, device=device)
        self.hidden = torch.zeros(self.plan.largest_prefill, hidden_size, dtype=dtype, device=device)
        self.sample_kernel = plan_sample(device)

    def plan_again(self) -> None:
        """Choose kernels and build tables anew, as start-up did."""
        self.model.plan(self.buffers.device, self.hidden.dtype)
        self.sample_kernel = plan_sample(self.buffers.device)

    def run(self, batch: Batch) -> StepResult:
        """Compute one step."""
        return self.launch(batch).wait()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Start one step. Where the device is not the host, it is still computed when this returns.

        Ids that the step before has sampled and nobody has waited for are taken from the device.
        """
        name = f"{'decode' if batch.is_decode else 'prefill'} {batch.num_tokens}"
        PROGRESS.step(name)
        with self.ranges(name):
            pending = self._decode(batch) if batch.is_decode else self._prefill(batch)
            return pending.fetch()

    def check_device(self, error: BaseException) -> None:
        """After a step that failed with `error`: whether the device still works.

        Raises:
            DeviceLost: it does not, and this process cannot use it any more.
        """
        if self.buffers.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.buffers.device)
        except RuntimeError as lost:
            cause = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DeviceLost(f"the GPU cannot go on after a step failed with: {cause}") from lost

    @torch.inference_mode()
    def warm(self, progress: Callable[[str], None], look: Look = see_nothing) -> None:
        """Run the dummy steps eagerly, through the sampler both greedy and not; only the scratch block is written.

        Args:
            progress: called before each kind of step.
            look: called with the hidden states and logits of each step, and with the ids that are sampled from them.
        """
        progress("prefill")
        self.run_dummy(self.dummies.prefill, look)
        progress("decode")
        for shape in self.dummies.decode:
            logits = self.run_dummy(shape, look)
            for token_ids in self._sample_every_way(logits, shape):
                look(Part("ids", shape), token_ids)

    @torch.inference_mode()
    def run_dummy(self, shape: StepShape, look: Look = see_nothing) -> torch.Tensor:
        """Run one dummy step eagerly; its logits, float32 [rows, vocab]."""
        inputs = self.buffers.fill_dummy(shape, self.pool.scratch)
        hidden = self._forward(shape, inputs)
        look(Part("hidden states", shape), hidden)
        logits = self._logits(hidden[inputs.last_tokens])
        look(Part("logits", shape), logits)
        return logits

    @torch.inference_mode()
    def replay_largest(self, generation: Generation, look: Look = see_nothing) -> None:
        """Replay the largest captured step of each kind of `generation` on dummy inputs, in scratch blocks."""
        for size, graph in list(generation.decode.items())[-1:]:
            shape = self._decode_shape(size)
            self.buffers.fill_dummy(shape, self.pool.scratch)
            graph.replay()
            look(Part("logits", shape, captured=True), self.logits[:size])
        for bucket, graph in list(generation.prefill.items())[-1:]:
            shape = self._prefill_shape(bucket)
            self.buffers.fill_dummy(shape, self.pool.scratch)
            graph.replay()
            look(Part("hidden states", shape, captured=True), self.hidden[:bucket])

    @torch.inference_mode()
    def run_largest(self) -> None:
        """Run the dummy step that takes most memory, eagerly: as many tokens and samples as a step can have, every
        way to sample, and the log-probabilities of a prompt."""
        limits = self.buffers.limits
        rows = min(limits.max_rows, limits.max_tokens)
        shape = StepShape(limits.max_tokens, rows, -(-limits.max_tokens // rows), limits.max_blocks_per_row)
        inputs = self.buffers.fill_dummy(shape, self.pool.scratch)
        hidden = self._forward(shape, inputs)
        self._sample_every_way(self._logits(hidden[inputs.last_tokens]), shape)
        part = hidden[:PROMPT_LOGITS]
        token_logprobs(self._logits(part), torch.zeros(len(part), dtype=torch.int64, device=part.device), 1)

    @torch.inference_mode()
    def capture_one(self, kind: GraphKind, size: int) -> Graph:
        """Capture one step with the code as it is now; the caller drops it."""
        backend = self.make_backend()
        with backend.session():
            return self._capture(backend, kind, size)

    def install(self, generation: Generation) -> None:
        """Let `generation` serve from now on, and drop the one before it: nothing of it is running."""
        self.synchronize()
        self.generation = generation

    def note_kernels(self) -> None:
        """Remember which kernels are on the device, so that `unload_kernels` knows what is gone."""
        if self.modules is not None:
            self.modules.note()

    def unload_kernels(self) -> None:
        """Take from the device the kernels that nobody holds any more."""
        if self.modules is not None:
            self.synchronize()
            self.modules.unload()

    def recapture(self) -> None:
        """Capture the steps that serve anew in fresh memory, and free what they had: a failed capture may have left it
        larger than anything needs.

        Raises:
            torch.OutOfMemoryError: for the second time, with nothing else captured.
        """
        self.synchronize()
        number = self.generation.number
        self.make_backend().renew_memory()
        for is_last in (False, True):
            try:
                generation = self.capture(number, lambda _: None)
            except torch.OutOfMemoryError:
                if is_last:
                    raise
            else:
                break
            # Both do not fit.
            self.generation = Generation(number, {}, {})
            torch.cuda.empty_cache()
        self.install(generation)

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.buffers.device.type == "cuda":
            torch.cuda.synchronize(self.buffers.device)

    def _sample_every_way(self, logits: torch.Tensor, shape: StepShape) -> list[torch.Tensor]:
        found = []
        mask = np.full(-(-logits.shape[1] // 32), -1, dtype=np.int32)
        for params in DUMMY_SAMPLING:
            row = SamplingRow(params, 1, prompt_ids=(0,), answer_ids=(0,), allowed=None if params.plain else mask)
            batch = SamplingBatch.build([row] * logits.shape[0], logits.device)
            token_ids = self.sampler(logits, batch)
            if batch.logprobs is not None:
                self.sampler.logprobs(logits, token_ids, batch.logprobs)
            found.append(token_ids)
        if self.sample_on_device:
            found.append(self._sample_plain(logits, self.buffers.inputs(shape)))
        return found

    @torch.inference_mode()
    def capture(self, number: int, progress: Callable[[str], None]) -> Generation:
        """Capture every planned step with the code as it is now, largest first.

        The generation that serves now stays as it is; the caller installs the new one or drops it.
        """
        backend = self.make_backend()
        decode: dict[int, Graph] = {}
        prefill: dict[int, Graph] = {}
        with backend.session():
            for size in reversed(self.plan.decode):
                progress(f"decode {size}")
                decode[size] = self._capture(backend, "decode", size)
            for bucket in reversed(self.plan.prefill):
                progress(f"prefill {bucket}")
                prefill[bucket] = self._capture(backend, "prefill", bucket)
        return Generation(number, decode, prefill)

    @torch.inference_mode()
    def computed(self, kind: GraphKind, size: int, graph: Graph | None = None) -> list[torch.Tensor]:
        """Copies of what one planned step leaves behind for dummy inputs: run eagerly, or by a replay of `graph`."""
        step = self._step(kind, size)
        self.buffers.fill_dummy(step.shape, self.pool.scratch)
        for tensor in step.results:
            tensor.zero_()
        step.run() if graph is None else graph.replay()
        self.synchronize()
        return [tensor.clone() for tensor in step.results]

    def has_own_slots(self, kind: GraphKind, size: int) -> bool:
        """Whether each token of the dummy step has a slot of its own, so that what it computes is always the same."""
        return self._step(kind, size).shape.num_tokens <= len(self.pool.scratch) * self.buffers.block_size

    def _capture(self, backend: GraphBackend, kind: GraphKind, size: int) -> Graph:
        step = self._step(kind, size)
        self.buffers.fill_dummy(step.shape, self.pool.scratch)
        return backend.capture(step.run, kind=kind, label=f"{kind} {size}")

    def _step(self, kind: GraphKind, size: int) -> PlannedStep:
        return self._decode_step(size) if kind == "decode" else self._prefill_step(size)

    def _decode_shape(self, size: int) -> StepShape:
        return StepShape(size, size, 1, self.buffers.limits.max_blocks_per_row)

    def _prefill_shape(self, bucket: int) -> StepShape:
        limits = self.buffers.limits
        return StepShape(bucket, limits.max_rows, bucket, limits.max_blocks_per_row)

    def _decode_step(self, size: int) -> PlannedStep:
        shape = self._decode_shape(size)
        inputs = self.buffers.inputs(shape)
        logits, sampled = self.logits[:size], self.buffers.sampled[:size]

        def step() -> None:
            logits.copy_(self.model.compute_logits(self._forward(shape, inputs)))
            if self.sample_on_device:
                sampled.copy_(self._sample_plain(logits, inputs))

        return PlannedStep(shape, step, [logits, sampled])

    def _prefill_step(self, bucket: int) -> PlannedStep:
        shape = self._prefill_shape(bucket)
        inputs = self.buffers.inputs(shape)
        hidden = self.hidden[:bucket]

        def step() -> None:
            hidden.copy_(self._forward(shape, inputs))

        return PlannedStep(shape, step, [hidden])

    def _decode(self, batch: Batch) -> PendingStep:
        """A batch in which every row computes one token and samples."""
        rows = len(batch.rows)
        captured = self.generation.decode_graph(rows)
        if captured is None:
            inputs = self._fill(batch, shape := self._eager_shape(batch))
            with self.ranges("forward"):
                logits = self._logits(self._forward(shape, inputs))
            return self._sample(batch, logits, inputs)
        size, graph = captured
        inputs = self._fill(batch, self._decode_shape(size))
        with self.ranges(graph.label):
            graph.replay()
        if self._samples_plainly(batch.rows):
            return PendingStep(self.buffers.sampled[:rows])
        return self._sample(batch, self.logits[:rows], inputs)

    def _prefill(self, batch: Batch) -> PendingStep:
        """Any mix of prefill and decode."""
        captured = self.generation.prefill_graph(batch.num_tokens)
        if captured is None:
            inputs = self._fill(batch, shape := self._eager_shape(batch))
            with self.ranges("forward"):
                hidden = self._forward(shape, inputs)
        else:
            bucket, graph = captured
            inputs = self._fill(batch, self._prefill_shape(bucket))
            with self.ranges(graph.label):
                graph.replay()
            hidden = self.hidden[:bucket]
        if batch.num_samples:
            logits = self._logits(hidden.index_select(0, inputs.last_tokens[: batch.num_samples]))
            pending = self._sample(batch, logits, inputs)
        else:
            pending = PendingStep(self.buffers.sampled[:0])
        pending.prompt = self._prompt_logprobs(batch, hidden)
        return pending

    def _fill(self, batch: Batch, shape: StepShape) -> DeviceInputs:
        with self.ranges("fill"):
            return self.buffers.fill(batch, shape)

    def _samples_plainly(self, rows: list[Row]) -> bool:
        """Whether the kernel that captured steps sample with serves all of `rows`, with which the step was filled."""
        return self.sample_on_device and self.buffers.columns.plain and not any(row.forbidden_ids for row in rows)

    def _sample(self, batch: Batch, logits: torch.Tensor, inputs: DeviceInputs) -> PendingStep:
        """Choose ids from `logits` [rows that sample, vocab], and leave them where the next step looks for them."""
        with self.ranges("sample"):
            return self._choose(batch, logits, inputs)

    def _choose(self, batch: Batch, logits: torch.Tensor, inputs: DeviceInputs) -> PendingStep:
        rows = [row for row in batch.rows if row.samples]
        if self._samples_plainly(rows):
            pending = PendingStep(self._sample_plain(logits, inputs))
        else:
            sampling = sampling_batch(rows, logits.device)
            pending = PendingStep(self.sampler(logits, sampling))
            if sampling.logprobs is not None:
                found = self.sampler.logprobs(logits, pending.ids, sampling.logprobs)
                pending.rows = sampling.logprobs.rows
                pending.sampled = WantedLogprobs(found, sampling.logprobs.tops)
        self.buffers.sampled.index_copy_(0, inputs.sample_rows[: len(rows)], pending.ids)
        return pending

    def _sample_plain(self, logits: torch.Tensor, inputs: DeviceInputs) -> torch.Tensor:
        rows = logits.shape[0]
        return sample(
            logits,
            inputs.temperature[:rows],
            inputs.top_k[:rows],
            inputs.top_p[:rows],
            inputs.min_p[:rows],
            inputs.seeds[:rows],
            inputs.sample_positions[:rows],
            kernel=self.sample_kernel,
        )

    def _prompt_logprobs(self, batch: Batch, hidden: torch.Tensor) -> dict[int, list[WantedLogprobs]]:
        """For the rows that want them, what the step's hidden states say of the prompt's next tokens."""
        found: dict[int, list[WantedLogprobs]] = {}
        first = 0
        for index, row in enumerate(batch.rows):
            if row.prompt_logprobs is not None:
                targets = torch.tensor(row.prompt_targets, dtype=torch.int64, device=hidden.device)
                states = hidden[first : first + len(targets)]
                found[index] = [
                    WantedLogprobs(
                        token_logprobs(self._logits(part), ids, row.prompt_logprobs),
                        [row.prompt_logprobs] * len(ids),
                    )
                    for part, ids in zip(states.split(PROMPT_LOGITS), targets.split(PROMPT_LOGITS), strict=True)
                ]
            first += row.count
        return found

    def _forward(self, shape: StepShape, inputs: DeviceInputs) -> torch.Tensor:
        hidden: torch.Tensor = self.model(
            self.buffers.id_pool(shape).index_select(0, inputs.id_sources),
            inputs.positions,
            self.buffers.context(shape, inputs, self.pool.layers),
        )
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab] of [rows, hidden]."""
        return self.model.compute_logits(hidden).float()

    def _eager_shape(self, batch: Batch) -> StepShape:
        """The exact size of `batch`, with no wider a block table than its longest row needs."""
        longest = max(row.start + row.count for row in batch.rows)
        return StepShape(
            num_tokens=batch.num_tokens,
            num_rows=len(batch.rows),
            max_query_len=max(row.count for row in batch.rows),
            width=-(-longest // self.buffers.block_size),
        )


def sampling_batch(rows: list[Row], device: torch.device) -> SamplingBatch:
    """The sampler's inputs for `rows`, in their order."""
    return SamplingBatch.build([sampling_row(row) for row in rows], device)


def sampling_row(row: Row) -> SamplingRow:
    """How the token after `row` is to be sampled."""
    request, position = row.request, row.start + row.count
    history, grammar = request.history, request.grammar
    return SamplingRow(
        request.sampling,
        position,
        row.forbidden_ids if grammar is None else (),
        () if history is None else history.prompt_ids,
        () if history is None else history.answer_ids,
        None if grammar is None else grammar.allowed(row.forbidden_ids),
    )
