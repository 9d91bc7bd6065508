"""What the ranks send to the front."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from tokenspeed.runtime.protocol.cache import CacheEvents, CacheSnapshot
from tokenspeed.runtime.protocol.message import Message
from tokenspeed.runtime.protocol.state import EngineInfo, Loads, ModuleCode, ReloadStatus

FinishReason = Literal["stop", "length", "abort", "error"]


class Starting(Message, frozen=True):
    """Progress of the start-up, for the log."""

    phase: str
    detail: str = ""


class Ready(Message, frozen=True):
    """Every rank is up; requests are served from here on."""

    info: EngineInfo


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities at one position, from the model's own logits: before temperature, penalties, bias."""

    logprob: float
    """Of the token that stands there."""
    top_ids: list[int]
    """The likeliest tokens, likeliest first."""
    top_logprobs: list[float]


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
"""An edited sampler may give anything, and what is no id must not get to what counts on one."""


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one request."""

    request_id: str
    token_ids: list[TokenId]
    """New tokens only. A stop token that ended the request is not among them; see `matched_stop`."""
    finish_reason: FinishReason | None = None
    matched_stop: int | None = None
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    error: str = ""
    logprobs: list[TokenLogprobs] = []
    """Where asked for: one for each of `token_ids`, then one for `matched_stop` if there is one."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Where asked for, in the first output with a token: one for each token of the prompt, None for the first."""


class Admitted(Message, frozen=True):
    """These requests wait no longer: the step that is about to run is their first here. Sent once a request."""

    request_ids: list[str]


class Outputs(Message, frozen=True):
    """What one step produced."""

    outputs: list[RequestOutput]
    loads: Loads


class CallReply(Message, frozen=True):
    """The answer to a `ControlCall`: the JSON body, which has `success` and `message`."""

    call: int
    body: dict[str, Any]


class Committed(Message, frozen=True):
    """The code that serves from now on; sent at the start, at each commit, and when more is imported.

    `modules` are those that were not told before, by name, with what they run now; `forgotten` are those that were told
    and run no more. `reply` is that of the reload that committed: it is sent later, but says so whatever becomes of the
    ranks. `tactics` is what `Tactics.in_use` gives.
    """

    generation: int
    modules: dict[str, ModuleCode]
    forgotten: list[str] = msgspec.field(default_factory=list)
    reply: CallReply | None = None
    tactics: dict[str, Any] = msgspec.field(default_factory=dict)


class StepFailed(Message, frozen=True):
    """A step failed on a rank that cannot go on after it: its requests end with `error`, and no others."""

    request_ids: list[str]
    error: str


class Failed(Message, frozen=True):
    """A rank cannot go on. `message` is one sentence.

    The front replaces the ranks; when they have not been ready yet it ends with `exit_code`.
    """

    rank: int
    message: str
    exit_code: int = 1
    is_victim: bool = False
    """Another rank left it: that one is lost."""


class Pong(Message, frozen=True):
    """A rank is at work, or waits for some."""

    rank: int


ToFront = (
    Starting
    | Ready
    | Admitted
    | Outputs
    | CallReply
    | Committed
    | ReloadStatus
    | StepFailed
    | Failed
    | CacheSnapshot
    | CacheEvents
    | Pong
)
