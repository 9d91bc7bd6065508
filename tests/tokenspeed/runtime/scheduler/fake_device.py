"""A deterministic model over a paged KV cache that notices every slot that holds the wrong thing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed.runtime.protocol.reports import FinishReason, TokenLogprobs
from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.runtime.scheduler.batch import UNKNOWN_ID, Batch, Row, StepLogprobs
from tokenspeed.runtime.scheduler.request import Request

VOCAB = 11
EOS = 0
MODULUS = 2**61 - 1
START = 1


def extend(state: int, token_id: int) -> int:
    """The KV of a token: a number that depends on it and on every token before it."""
    return (state * 1_000_003 + token_id + 1) % MODULUS


def sample(state: int, forbidden: Sequence[int], answer: Sequence[int] = ()) -> int:
    """`answer` is what was chosen before, where the choice depends on that as with penalties."""
    token_id = ((state >> 7) + sum(answer)) % VOCAB
    while token_id in forbidden:
        token_id = (token_id + 1) % VOCAB
    return token_id


def logprobs(state: int, top: int) -> TokenLogprobs:
    """What the model says after a sequence: any numbers that belong to this sequence alone."""
    return TokenLogprobs(-(state % 1000) / 8, [state % VOCAB] * top, [-(state % 77) / 8] * top)


def reference_logprobs(tokens: list[int], top: int) -> list[TokenLogprobs]:
    """Those of every token but the first, and of the one that would follow."""
    state, found = START, []
    for token_id in tokens:
        state = extend(state, token_id)
        found.append(logprobs(state, top))
    return found


def reference(prompt: list[int], params: SamplingParams, max_len: int) -> tuple[list[int], FinishReason, int | None]:
    """What a request gives when it runs alone, token by token: new ids, finish reason, matched stop."""
    stops = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
    state = START
    for token_id in prompt:
        state = extend(state, token_id)
    new: list[int] = []
    while True:
        early = len(new) < params.min_new_tokens
        token_id = sample(state, tuple(stops) if early else (), new if params.penalised else ())
        if token_id in stops and not early:
            return new, "stop", token_id
        new.append(token_id)
        if len(new) >= params.max_new_tokens or len(prompt) + len(new) >= max_len:
            return new, "length", None
        state = extend(state, token_id)


@dataclass(frozen=True)
class Slot:
    """What one slot holds, and who wrote it when."""

    token_id: int
    state: int
    epoch: int
    step: int


@dataclass
class Life:
    """A request from one admission to the next: it has one list of blocks, and one epoch."""

    blocks: list[int]
    epoch: int


class FakeDevice:
    """Runs every step at once, as a device does in stream order; the ids are handed out at `finish`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.epoch = 0
        """Counts the flushes and reseeds; KV of an earlier epoch must not be found again."""
        self.slots: dict[int, Slot] = {}
        self.lives: dict[Request, Life] = {}
        self.pending: list[tuple[int, Batch, dict[int, int], StepLogprobs]] = []
        self.num_steps = 0

    def run(self, batch: Batch) -> None:
        self._check_writes_are_exclusive(batch)
        sampled: dict[int, int] = {}
        told = StepLogprobs({}, {})
        for index, row in enumerate(batch.rows):
            states = self._forward(row)
            if row.samples:
                top = row.request.sampling.logprobs
                if top is not None:
                    told.sampled[len(sampled)] = logprobs(states[-1], top)
                sampled[index] = self._sample(row, states[-1])
            if row.prompt_logprobs is not None:
                targets = zip(states, row.prompt_targets, strict=False)
                told.prompt[index] = [logprobs(state, row.prompt_logprobs) for state, _ in targets]
        self.pending.append((self.num_steps, batch, sampled, told))
        self.num_steps += 1

    def finish(self) -> tuple[Batch, list[int], StepLogprobs | None]:
        """The oldest step, and what it gave."""
        _, batch, sampled, told = self.pending.pop(0)
        return batch, list(sampled.values()), told if told.sampled or told.prompt else None

    def _sample(self, row: Row, state: int) -> int:
        request = row.request
        assert (request.history is not None) == request.sampling.penalised
        if request.history is None:
            return sample(state, row.forbidden_ids)
        answer = list(request.history.answer_ids)
        assert len(request.prompt) + len(answer) == row.start + row.count, "chose without the tokens before"
        assert sorted(request.history.prompt_ids) == sorted(set(request.prompt))
        return sample(state, row.forbidden_ids, answer)

    def _forward(self, row: Row) -> list[int]:
        """The state after each token of the row."""
        life = self._life(row)
        state = START
        for position in range(row.start):
            slot = self.slots[self._slot(row, position)]
            assert slot.epoch == life.epoch, "read KV of another epoch"
            state = extend(state, slot.token_id)
            assert slot.state == state, "read KV of another sequence"
        states: list[int] = []
        for offset, token_id in enumerate(row.token_ids):
            token_id = self._resolve(row, token_id)
            state = extend(state, token_id)
            slot_id = self._slot(row, row.start + offset)
            self.slots[slot_id] = Slot(token_id, state, life.epoch, self.num_steps)
            states.append(state)
        return states

    def _life(self, row: Row) -> Life:
        life = self.lives.get(row.request)
        if life is None or life.blocks is not row.block_table:
            life = self.lives[row.request] = Life(row.block_table, self.epoch)
            oldest_pending = self.pending[0][0] if self.pending else self.num_steps
            for position in range(row.start):
                step = self.slots[self._slot(row, position)].step
                assert step < oldest_pending, "found a block whose step is not committed"
        return life

    def _resolve(self, row: Row, token_id: int) -> int:
        if token_id != UNKNOWN_ID:
            return token_id
        assert row.source_row is not None and self.pending
        _, batch, sampled, _ = self.pending[-1]
        source = batch.rows[row.source_row]
        assert source.request is row.request and source.samples
        assert source.start + source.count == row.start
        return sampled[row.source_row]

    def _slot(self, row: Row, position: int) -> int:
        block = row.block_table[position // self.block_size]
        assert 1 <= block <= self.num_blocks
        return block * self.block_size + position % self.block_size

    def _check_writes_are_exclusive(self, batch: Batch) -> None:
        """No block that a row writes is used by another request of this step or of one in flight."""
        users: dict[int, set[str]] = {}
        steps = [batch, *(pending for _, pending, _, _ in self.pending)]
        for row in (row for step in steps for row in step.rows):
            for block in row.block_table[: -(-(row.start + row.count) // self.block_size)]:
                users.setdefault(block, set()).add(row.request.request_id)
        for row in batch.rows:
            for position in range(row.start, row.start + row.count):
                block = row.block_table[position // self.block_size]
                assert users[block] == {row.request.request_id}, "wrote to a block that others use"
