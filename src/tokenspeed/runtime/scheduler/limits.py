"""What a scheduler may put into one step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`max_num_seqs` requests run at once, with `max_num_batched_tokens` tokens a step in all.

    A request ends with reason "length" when prompt and answer together have `max_model_len` tokens.
    `block_size` is that of the KV cache, in tokens.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    eos_token_ids: tuple[int, ...]
