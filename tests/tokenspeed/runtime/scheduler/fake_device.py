"""A deterministic model over a paged KV cache that notices every slot that holds the wrong thing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed.runtime.protocol import FinishReason, SamplingParams
from tokenspeed.runtime.scheduler.batch import UNKNOWN_ID, Batch, Row
from tokenspeed.runtime.scheduler.request import Request

VOCAB = 11
EOS = 0
MODULUS = 2**61 - 1
START = 1


def extend(state: int, token_id: int) -> int:
    """The KV of a token: a number that depends on it and on every token before it."""
    return (state * 1_000_003 + token_id + 1) % MODULUS


def sample(state: int, forbidden: Sequence[int]) -> int:
    token_id = (state >> 7) % VOCAB
    while token_id in forbidden:
        token_id = (token_id + 1) % VOCAB
    return token_id


def reference(prompt: list[int], params: SamplingParams, max_len: int) -> tuple[list[int], FinishReason, int | None]:
    """What a request gives when it runs alone, token by token: new ids, finish reason, matched stop."""
    stops = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
    state = START
    for token_id in prompt:
        state = extend(state, token_id)
    new: list[int] = []
    while True:
        early = len(new) < params.min_new_tokens
        token_id = sample(state, tuple(stops) if early else ())
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
        self.pending: list[tuple[int, Batch, dict[int, int]]] = []
        self.num_steps = 0

    def run(self, batch: Batch) -> None:
        self._check_writes_are_exclusive(batch)
        sampled = {
            index: sample(self._forward(row), row.forbidden_ids) if row.samples else self._forward(row)
            for index, row in enumerate(batch.rows)
        }
        self.pending.append((self.num_steps, batch, sampled))
        self.num_steps += 1

    def finish(self) -> tuple[Batch, list[int]]:
        """The oldest step, and the ids that it sampled."""
        _, batch, sampled = self.pending.pop(0)
        return batch, [sampled[index] for index, row in enumerate(batch.rows) if row.samples]

    def _forward(self, row: Row) -> int:
        life = self._life(row)
        state = START
        for position in range(row.start):
            slot = self.slots[self._slot(row, position)]
            assert slot.epoch == life.epoch, "read KV of another epoch"
            state = extend(state, slot.token_id)
            assert slot.state == state, "read KV of another sequence"
        for offset, token_id in enumerate(row.token_ids):
            token_id = self._resolve(row, token_id)
            state = extend(state, token_id)
            slot_id = self._slot(row, row.start + offset)
            self.slots[slot_id] = Slot(token_id, state, life.epoch, self.num_steps)
        return state

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
        _, batch, sampled = self.pending[-1]
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
        steps = [batch, *(pending for _, pending, _ in self.pending)]
        for row in (row for step in steps for row in step.rows):
            for block in row.block_table[: -(-(row.start + row.count) // self.block_size)]:
                users.setdefault(block, set()).add(row.request.request_id)
        for row in batch.rows:
            for position in range(row.start, row.start + row.count):
                block = row.block_table[position // self.block_size]
                assert users[block] == {row.request.request_id}, "wrote to a block that others use"
