"""What the front sends to the ranks."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenspeed.runtime.protocol.message import Message
from tokenspeed.runtime.protocol.sampling import SamplingParams

DrainMode = Literal["wait", "abort", "keep"]


class Submit(Message, frozen=True):
    """One accepted request."""

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    shares_prompt_with: str | None = None
    """An earlier request with this very prompt: this one starts once the KV of that one's prompt can be found."""
    generated: list[int] = msgspec.field(default_factory=list)
    """Tokens of the answer that other ranks produced before they were replaced. None of them is sent again."""
    admitted: bool = False
    """Other ranks had begun it: it goes on like a preempted request, whatever holds the waiting ones."""


class LoadGrammars(Message, frozen=True):
    """A first grammar is being compiled: load what grammars need, apart from the loop."""


class DefineGrammar(Message, frozen=True):
    """The compiled form of a grammar, before the first request that names its `key`: that with `request_id`."""

    key: int
    compiled: bytes
    request_id: str = ""


class ForgetGrammar(Message, frozen=True):
    """No request to come names this key; those that are there go on."""

    key: int


class WatchCache(Message, frozen=True):
    """Tell what the prefix index holds, in a `CacheSnapshot` with this `watch`, and from then on what changes in it."""

    watch: int


class UnwatchCache(Message, frozen=True):
    """Nobody wants to hear of the prefix index any more."""


class Abort(Message, frozen=True):
    """End a request wherever it is; unknown ids are ignored, since it may just have finished."""

    request_id: str


class ControlCall(Message, frozen=True):
    """Root of the calls that are answered by exactly one `CallReply` with the same `call`."""

    call: int


class Reload(ControlCall, frozen=True):
    """`reload_forward`. `id` names the operation: the same id again is the same operation."""

    id: str
    mode: DrainMode = "wait"
    modules: tuple[str, ...] | None = None
    timeout_s: float = 600.0
    by: str | None = None


class Pause(ControlCall, frozen=True):
    """Stop admitting requests; `wait` replies once the running ones finished, `abort` ends them, `keep` holds them."""

    mode: DrainMode = "wait"


class Continue(ControlCall, frozen=True):
    """End a pause, and cancel the reloads and drains that wait."""


class FlushCache(ControlCall, frozen=True):
    """Forget the prefix index, so that no KV computed so far is reused."""


ProfileActivity = Literal["CPU", "GPU", "MEM", "CUDA_PROFILER"]


class StartProfile(ControlCall, frozen=True):
    """Record the steps to come into files of `output_dir`; the front has filled in the directory and the id.

    Ends by `StopProfile`, or by itself after `num_steps` steps. Without activities all are meant that the
    device has for the torch profiler: CPU, and GPU on CUDA.
    """

    profile_id: str
    output_dir: str
    activities: tuple[ProfileActivity, ...] = ()
    start_step: int = 0
    """Number of the first step to record, counted from the start of the server; a past one means the next."""
    num_steps: int | None = None
    with_stack: bool = False
    record_shapes: bool = False
    profile_by_stage: bool = False
    """Record prefill steps and decode steps apart, `num_steps` of each."""


class StopProfile(ControlCall, frozen=True):
    """End the profile; answered once every rank has written its files."""


class Ping(Message, frozen=True):
    """Every rank answers with a `Pong`, between two steps."""


class Stop(Message, frozen=True):
    """Leave the loop after the entry that runs; what is still held or running is dropped by the front."""


ToEngine = (
    Submit
    | LoadGrammars
    | DefineGrammar
    | ForgetGrammar
    | WatchCache
    | UnwatchCache
    | Abort
    | Reload
    | Pause
    | Continue
    | FlushCache
    | StartProfile
    | StopProfile
    | Ping
    | Stop
)
