"""The steps that start-up runs before it serves, and every reload again before it commits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from tokenspeed.runtime.execution.buffers import BufferLimits
from tokenspeed.runtime.execution.inputs import StepShape
from tokenspeed.runtime.protocol.sampling import SamplingParams

WARM_TOKENS = 8
"""Tokens of the dummy prefill."""

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


@dataclass(frozen=True)
class DummySteps:
    """The steps that warm the code: start-up saves them, a reload runs the very same ones."""

    prefill: StepShape
    decode: tuple[StepShape, ...]


class Part(NamedTuple):
    """A part of what a dummy step of this shape computes, eagerly or by a captured graph."""

    what: Literal["hidden states", "logits", "ids"]
    shape: StepShape
    captured: bool = False

    def __str__(self) -> str:
        kind = "decode" if self.shape.max_query_len == 1 else "prefill"
        return f"the {self.what} of a dummy {kind} of {self.shape.num_tokens} token(s){' in a graph' * self.captured}"


Look = Callable[[Part, Tensor], None]
"""Is shown a part, which the next step may overwrite."""


def see_nothing(part: Part, computed: Tensor) -> None:
    """Nobody looks."""


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
