"""What one step of the model computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tokenspeed.runtime.protocol.reports import TokenLogprobs
from tokenspeed.runtime.scheduler.request import Request

UNKNOWN_ID = -1
"""Stands for an input id that the step in flight is about to sample."""


@dataclass(slots=True, eq=False)
class Row:
    """The tokens of one request in one step, at positions `start` to `start + count - 1`.

    Read only, but not frozen: a frozen dataclass takes three times as long to make.
    """

    request: Request
    start: int
    count: int
    samples: bool
    """Whether the id after the last token is sampled; not so in a chunk that leaves a prefill unfinished."""
    token_ids: list[int]
    """The `count` input ids. `[UNKNOWN_ID]` is the id that row `source_row` of the step in flight samples."""
    source_row: int | None
    block_table: list[int]
    """Blocks of the request. Shared and append-only: the blocks of all positions of this row never change."""
    forbidden_ids: tuple[int, ...]
    """Ids that the sampler must not choose."""
    prompt_logprobs: int | None = None
    """How many likeliest tokens are wanted for each token of the prompt that comes right after one of this row."""

    @property
    def prompt_targets(self) -> list[int]:
        """The tokens of the prompt that come right after the tokens of this row."""
        return self.request.prompt[self.start + 1 : self.start + self.count + 1]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step. Rows of one token that sample, as in decode, come before all others."""

    rows: list[Row]
    num_tokens: int
    num_decode_rows: int
    """Leading rows of one token that sample."""
    num_samples: int
    """Rows that sample."""

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token and samples."""
        return self.num_decode_rows == len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """The log-probabilities that a step was asked for."""

    sampled: dict[int, TokenLogprobs]
    """By index among the sampled ids."""
    prompt: dict[int, list[TokenLogprobs]]
    """By row: one for each of its `prompt_targets`."""


class StepResult(NamedTuple):
    """What one step computed."""

    token_ids: list[int]
    """One for each row that samples, in row order."""
    logprobs: StepLogprobs | None = None
    """None where nobody asked for any."""


@dataclass(slots=True, eq=False)
class BatchBuilder:
    """A batch that is being put together; `budget` is what is left of the step's tokens."""

    budget: int
    decode_rows: list[Row] = field(default_factory=list)
    prefill_rows: list[Row] = field(default_factory=list)
    num_tokens: int = 0
    held_back: Request | None = None
    """Request that sits this step out, so that it can be preempted in the next."""

    def add_chunk(self, request: Request) -> None:
        """Add as many known but unscheduled tokens of the request as the budget allows."""
        known = request.token_ids
        start = request.num_scheduled
        count = min(self.budget, len(known) - start)
        end = start + count
        samples = end == len(known)
        forbidden = request.stop_ids if samples and end < request.stops_from else ()
        blocks = request.table.blocks
        logprobs = None if request.prompt_logprobs is None else request.sampling.prompt_logprobs
        row = Row(request, start, count, samples, known[start:end], None, blocks, forbidden, logprobs)
        rows = self.decode_rows if samples and count == 1 else self.prefill_rows
        rows.append(row)
        request.num_scheduled = end
        request.in_flight += 1
        self.budget -= count
        self.num_tokens += count

    def build(self) -> Batch | None:
        """The batch, or None without rows. Tells every request its row."""
        rows = self.decode_rows + self.prefill_rows
        if not rows:
            return None
        for index, row in enumerate(rows):
            row.request.row = index
        num_samples = sum(row.samples for row in rows)
        return Batch(rows, self.num_tokens, len(self.decode_rows), num_samples)
