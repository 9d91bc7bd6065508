"""Runs the model on one batch: eagerly, or by replaying a captured step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenspeed.runtime.cache.pool import KVPool
from tokenspeed.runtime.execution.buffers import BatchBuffers, BufferLimits, StepShape
from tokenspeed.runtime.execution.capture_plan import CapturePlan
from tokenspeed.runtime.execution.generation import Generation
from tokenspeed.runtime.execution.graphs.base import Graph, GraphBackend
from tokenspeed.runtime.models.base import CausalLM
from tokenspeed.runtime.protocol import SamplingParams, TokenLogprobs
from tokenspeed.runtime.sampling.batch import SamplingBatch, SamplingRow
from tokenspeed.runtime.sampling.logprobs import token_logprobs
from tokenspeed.runtime.sampling.sampler import Sampler
from tokenspeed.runtime.scheduler.batch import Batch, Row, StepLogprobs, StepResult

WARM_TOKENS = 8
"""Tokens of the dummy prefill that start-up runs, and that every reload runs again."""

WARM_ROWS = 3
"""Sequences of the dummy steps with several: what an edit breaks for a batch must not wait for one."""

DUMMY_SAMPLING = (
    SamplingParams(max_new_tokens=1, temperature=0.0),
    SamplingParams(max_new_tokens=1, temperature=1.0),
    SamplingParams(max_new_tokens=1, temperature=1.0, top_p=0.9, top_k=8, min_p=0.1),
    SamplingParams(
        max_new_tokens=1,
        temperature=0.0,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.5,
        logit_bias=((0, 1.0),),
        logprobs=1,
    ),
)
"""One for each path through the sampler."""

PROMPT_LOGITS = 256
"""Tokens of a prompt whose logits are in memory at once where their log-probabilities are wanted."""


@dataclass(frozen=True)
class DummySteps:
    """The steps that warm the code: start-up saves them, a reload runs the very same ones."""

    prefill: StepShape
    decode: tuple[StepShape, ...]


class Executor:
    """Owns the step: buffers in, token ids out.

    `logits` is float32 [largest decode graph, vocab] and `hidden` [largest prefill bucket, hidden]: captured
    steps leave their results there. `generation` is the set of graphs that serves now. `make_backend` is called
    once for every generation: its graphs share what the backend holds.
    """

    def __init__(
        self,
        model: CausalLM,
        sampler: Sampler,
        pool: KVPool,
        buffers: BatchBuffers,
        plan: CapturePlan,
        make_backend: Callable[[], GraphBackend],
    ):
        self.model = model
        self.sampler = sampler
        self.pool = pool
        self.buffers = buffers
        self.plan = plan
        self.make_backend = make_backend
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

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """Compute one step."""
        if batch.is_decode:
            return self._sample(batch.rows, self._decode(batch), {})
        hidden = self._prefill(batch)
        prompt = self._prompt_logprobs(batch, hidden)
        rows = [index for index, row in enumerate(batch.rows) if row.samples]
        if not rows:
            return StepResult([], StepLogprobs({}, prompt) if prompt else None)
        wanted = self.buffers.logits_rows[torch.tensor(rows, dtype=torch.int64, device=hidden.device)]
        logits = self.model.compute_logits(hidden[wanted])
        return self._sample([batch.rows[index] for index in rows], logits, prompt)

    @torch.inference_mode()
    def warm(self, progress: Callable[[str], None]) -> None:
        """Run the dummy steps eagerly, through the sampler both greedy and not; only the scratch block is written."""
        progress("prefill")
        self._warm_logits(self.dummies.prefill)
        progress("decode")
        for shape in self.dummies.decode:
            self._warm_sampler(self._warm_logits(shape))

    def _warm_logits(self, shape: StepShape) -> torch.Tensor:
        self.buffers.fill_dummy(shape, self.pool.shape.block_size)
        hidden = self._forward(shape)
        return self.model.compute_logits(hidden[self.buffers.logits_rows[: shape.num_rows]])

    def _warm_sampler(self, logits: torch.Tensor) -> None:
        for params in DUMMY_SAMPLING:
            row = SamplingRow(params, 1, prompt_ids=(0,), answer_ids=(0,))
            batch = SamplingBatch.build([row] * logits.shape[0], logits.device)
            token_ids = self.sampler(logits, batch)
            if batch.logprobs is not None:
                self.sampler.logprobs(logits, token_ids, batch.logprobs)

    @torch.inference_mode()
    def capture(self, number: int, progress: Callable[[str], None]) -> Generation:
        """Capture every planned step with the code as it is now, largest first.

        The generation that serves now stays as it is; the caller installs the new one or drops it.
        """
        backend = self.make_backend()
        width = self.buffers.limits.max_blocks_per_row
        decode: dict[int, Graph] = {}
        for size in reversed(self.plan.decode):
            progress(f"decode {size}")
            decode[size] = self._capture_decode(backend, StepShape(size, size, 1, width))
        prefill: dict[int, Graph] = {}
        for bucket in reversed(self.plan.prefill):
            progress(f"prefill {bucket}")
            shape = StepShape(bucket, self.buffers.limits.max_rows, bucket, width)
            prefill[bucket] = self._capture_prefill(backend, shape)
        return Generation(number, decode, prefill)

    def _capture_decode(self, backend: GraphBackend, shape: StepShape) -> Graph:
        def step() -> None:
            hidden = self._forward(shape)
            self.logits[: shape.num_rows].copy_(self.model.compute_logits(hidden))

        self.buffers.fill_dummy(shape, self.pool.shape.block_size)
        return backend.capture(step, label=f"decode {shape.num_rows}")

    def _capture_prefill(self, backend: GraphBackend, shape: StepShape) -> Graph:
        def step() -> None:
            self.hidden[: shape.num_tokens].copy_(self._forward(shape))

        self.buffers.fill_dummy(shape, self.pool.shape.block_size)
        return backend.capture(step, label=f"prefill {shape.num_tokens}")

    def _decode(self, batch: Batch) -> torch.Tensor:
        """Logits [rows, vocab] of a batch in which every row computes one token and samples."""
        rows = len(batch.rows)
        captured = self.generation.decode_graph(rows)
        if captured is None:
            self._fill(batch, shape := self._eager_shape(batch))
            return self.model.compute_logits(self._forward(shape))
        size, graph = captured
        self._fill(batch, StepShape(size, size, 1, self.buffers.limits.max_blocks_per_row))
        graph.replay()
        return self.logits[:rows]

    def _prefill(self, batch: Batch) -> torch.Tensor:
        """Hidden states of the tokens of the batch, in its order, perhaps padded; any mix of prefill and decode."""
        captured = self.generation.prefill_graph(batch.num_tokens)
        if captured is None:
            self._fill(batch, shape := self._eager_shape(batch))
            return self._forward(shape)
        bucket, graph = captured
        limits = self.buffers.limits
        self._fill(batch, StepShape(bucket, limits.max_rows, bucket, limits.max_blocks_per_row))
        graph.replay()
        return self.hidden[:bucket]

    def _sample(self, rows: list[Row], logits: torch.Tensor, prompt: dict[int, list[TokenLogprobs]]) -> StepResult:
        """Choose a token for each of `rows` from its row of `logits`, and tell what was asked for."""
        batch = sampling_batch(rows, logits.device)
        token_ids = self.sampler(logits, batch)
        sampled: dict[int, TokenLogprobs] = {}
        if batch.logprobs is not None:
            found = self.sampler.logprobs(logits, token_ids, batch.logprobs)
            sampled = dict(zip(batch.logprobs.rows, found.tolist(batch.logprobs.tops), strict=True))
        return StepResult(token_ids.tolist(), StepLogprobs(sampled, prompt) if sampled or prompt else None)

    def _prompt_logprobs(self, batch: Batch, hidden: torch.Tensor) -> dict[int, list[TokenLogprobs]]:
        """For the rows that want them, what the step's hidden states say of the prompt's next tokens."""
        found: dict[int, list[TokenLogprobs]] = {}
        first = 0
        for index, row in enumerate(batch.rows):
            if row.prompt_logprobs is not None:
                found[index] = []
                targets = torch.tensor(row.prompt_targets, dtype=torch.int64, device=hidden.device)
                states = hidden[first : first + len(targets)]
                for part, ids in zip(states.split(PROMPT_LOGITS), targets.split(PROMPT_LOGITS), strict=True):
                    logprobs = token_logprobs(self.model.compute_logits(part), ids, row.prompt_logprobs)
                    found[index] += logprobs.tolist([row.prompt_logprobs] * len(ids))
            first += row.count
        return found

    def _forward(self, shape: StepShape) -> torch.Tensor:
        tokens = shape.num_tokens
        hidden: torch.Tensor = self.model(
            self.buffers.input_ids[:tokens],
            self.buffers.positions[:tokens],
            self.buffers.context(shape, self.pool.layers),
        )
        return hidden

    def _fill(self, batch: Batch, shape: StepShape) -> None:
        self.buffers.fill(batch, shape, self.pool.shape.block_size)

    def _eager_shape(self, batch: Batch) -> StepShape:
        """The exact size of `batch`, with no wider a block table than its longest row needs."""
        longest = max(row.start + row.count for row in batch.rows)
        return StepShape(
            num_tokens=batch.num_tokens,
            num_rows=len(batch.rows),
            max_query_len=max(row.count for row in batch.rows),
            width=-(-longest // self.pool.shape.block_size),
        )


def dummy_steps(limits: BufferLimits) -> DummySteps:
    """A prefill of several sequences, a decode of one and of several, as far as the limits permit.

    All have the width that captured steps have.
    """
    width = limits.max_blocks_per_row
    tokens = min(WARM_TOKENS, limits.max_tokens)
    rows = min(WARM_ROWS, tokens, limits.max_rows)
    return DummySteps(
        prefill=StepShape(tokens, rows, -(-tokens // rows), width),
        decode=tuple(StepShape(count, count, 1, width) for count in sorted({1, rows})),
    )


def sampling_batch(rows: list[Row], device: torch.device) -> SamplingBatch:
    """The sampler's inputs for `rows`, in their order."""
    return SamplingBatch.build([sampling_row(row) for row in rows], device)


def sampling_row(row: Row) -> SamplingRow:
    """How the token after `row` is to be sampled."""
    request, position = row.request, row.start + row.count
    if request.history is None:
        return SamplingRow(request.sampling, position, row.forbidden_ids)
    history = request.history
    return SamplingRow(request.sampling, position, row.forbidden_ids, history.prompt_ids, history.answer_ids)
