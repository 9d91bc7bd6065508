"""The messages between the front process and the ranks, and from rank 0 to its peers.

All are msgspec structs, sent as MessagePack over ZMQ; a struct's name is its tag on the wire.
Token ids are plain ints, times are seconds.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

DrainMode = Literal["wait", "abort", "keep"]
FinishReason = Literal["stop", "length", "abort", "error"]

FIRST_WEIGHT_VERSION = "default"
"""Version of the weights that a server starts with."""


class Message(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Root of everything that crosses a process boundary."""


GrammarKind = Literal["regex", "json_schema", "ebnf", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of an answer must look like; `text` is the source in the language that `kind` names."""

    kind: GrammarKind
    text: str
    key: int | None = None
    """Of its `DefineGrammar`, when it reaches a rank."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one answer are chosen.

    `seed` is always set when it reaches a rank: the front draws one for a request that brings none, so that all
    ranks agree. A request for several answers is one request each here, with a seed each.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """Least probability of a candidate, as a share of the most likely token's; 0 is off."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the answer has."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each time that the answer has it."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens that prompt or answer have; 1 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), each id once."""
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None is off; else each token comes with its log-probability and with those of so many likeliest tokens."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    grammar: Grammar | None = None

    @property
    def penalised(self) -> bool:
        """Whether what is chosen depends on how often the tokens so far have which id."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def needs_history(self) -> bool:
        """Whether a token can be sampled only once the one before it is known on the host."""
        return self.penalised or self.grammar is not None

    @property
    def plain(self) -> bool:
        """Whether temperature, top-k, top-p, min-p and the seed are all that the choice of a token needs."""
        return not (self.needs_history or self.logit_bias or self.logprobs is not None)


# ---- front to ranks ----


class Submit(Message, frozen=True):
    """One accepted request."""

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    shares_prompt_with: str | None = None
    """An earlier request with this very prompt: this one starts once the KV of that one's prompt can be found."""
    generated: list[int] = []
    """Tokens of the answer that other ranks produced before they were replaced. None of them is sent again."""
    admitted: bool = False
    """Other ranks had begun it: it goes on like a preempted request, whatever holds the waiting ones."""


class LoadGrammars(Message, frozen=True):
    """A first grammar is being compiled: load what grammars need, apart from the loop."""


class DefineGrammar(Message, frozen=True):
    """The compiled form of a grammar, before the first request that names its `key`."""

    key: int
    compiled: bytes


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
    """Stop admitting requests; `wait` replies once the running ones finished, `abort` ends them."""

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


# ---- ranks to front ----


class Loads(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler holds now; sent with every batch of outputs and on change."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    used_blocks: int = 0
    """Blocks that requests hold."""
    cached_blocks: int = 0
    """Blocks that only the prefix index keeps."""
    total_blocks: int = 0
    prefix_queried_tokens: int = 0
    """Prompt tokens looked up in the prefix index since the start."""
    prefix_hit_tokens: int = 0
    """Of these, tokens found."""
    preemptions: int = 0
    steps: int = 0
    """Steps that were scheduled since the start."""
    step_tokens: int = 0
    """Tokens of all these, prefill and decode together."""
    paused: bool = False
    generation: int = 0
    """Number of the forward code that computes."""
    weight_version: str = FIRST_WEIGHT_VERSION
    """Version of the weights that it computes with."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine serves, known once it is ready."""

    model_path: str
    tokenizer_path: str
    """Directory with tokenizer.json, tokenizer_config.json and config.json, readable by the gateway."""
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    dtype: str
    device: str
    tensor_parallel_size: int
    block_size: int
    num_blocks: int
    """Usable KV blocks; the scratch block is not counted."""
    default_sampling: dict[str, float] = {}
    """Sampling defaults from the model's generation_config.json."""
    decode_graphs: tuple[int, ...] = ()
    """Captured decode batch sizes."""
    prefill_graphs: tuple[int, ...] = ()
    """Captured prefill buckets, in tokens."""
    startup: dict[str, float] = {}
    """Seconds of each start-up phase."""
    kernels_compiled: int = 0
    """Kernels that start-up had to compile; those that it found in a cache on disk are not counted."""
    kernels_compiled_seconds: float = 0.0


class Ready(Message, frozen=True):
    """Every rank is up; requests are served from here on."""

    info: EngineInfo


class Starting(Message, frozen=True):
    """Progress of the start-up, for the log."""

    phase: str
    detail: str = ""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities at one position, from the model's own logits: before temperature, penalties, bias."""

    logprob: float
    """Of the token that stands there."""
    top_ids: list[int]
    """The likeliest tokens, likeliest first."""
    top_logprobs: list[float]


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one request."""

    request_id: str
    token_ids: list[int]
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


class CachedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One full KV block of the prefix index. Equal hashes mean equal tokens from the start, as far as 64 bits tell."""

    block_hash: int
    """Signed, 64 bits."""
    token_ids: list[int]


class BlocksStored(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Blocks that follow each other can be found from now on."""

    parent: int | None
    """Hash of the block before the first of them; None at the start of a prompt."""
    blocks: list[CachedBlock]


class BlocksRemoved(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Blocks can be found no longer."""

    hashes: list[int]


class CacheCleared(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """No block can be found any longer."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared


class CacheSnapshot(Message, frozen=True):
    """All that the prefix index holds, parents before children; the answer to the `WatchCache` of this `watch`."""

    watch: int
    stored: list[BlocksStored]


class CacheEvents(Message, frozen=True):
    """What changed in the prefix index since the last message of this kind, or since the snapshot."""

    events: list[CacheEvent]


class CallReply(Message, frozen=True):
    """The answer to a `ControlCall`: the JSON body, which has `success` and `message`."""

    call: int
    body: dict[str, Any]


class Pong(Message, frozen=True):
    """A rank is at work, or waits for some."""

    rank: int


class ReloadStatus(Message, frozen=True):
    """Where a reload stands; sent at every change of state."""

    state: str
    generation: int
    id: str | None = None
    by: str | None = None
    detail: str = ""


class StepFailed(Message, frozen=True):
    """A step failed on a rank that cannot go on after it: its requests end with `error`, and no others."""

    request_ids: list[str]
    error: str


class ModuleCode(msgspec.Struct, frozen=True, kw_only=True):
    """A module as it runs: the bytes of its source, the file they came from, and the installed file."""

    path: str
    data: bytes
    origin: str


class Committed(Message, frozen=True):
    """The code that serves from now on; sent at the start, at each commit, and when more is imported.

    `modules` are those that were not told before, by name, with what they run now. `reply` is that of the reload that
    committed: it is sent later, but says so whatever becomes of the ranks.
    """

    generation: int
    modules: dict[str, ModuleCode]
    reply: CallReply | None = None


SIGN_INTERVAL_S = 1.0
"""Seconds between two signs of a rank."""


class Sign(Message, frozen=True):
    """How far a rank has come, by `tokenspeed_kernel.progress`, and where its main thread stands.

    It comes from another thread and over a socket of its own (`signs`), so that a main thread that loops does not stop
    it.
    """

    rank: int
    count: int
    what: str
    waiting_for: str | None
    file: str
    line: int
    function: str


class Failed(Message, frozen=True):
    """A rank cannot go on. `message` is one sentence.

    The front replaces the ranks; when they have not been ready yet it ends with `exit_code`.
    """

    rank: int
    message: str
    exit_code: int = 1
    is_victim: bool = False
    """Another rank left it: that one is lost."""


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


# ---- what both sides work out alike ----


def choice_seed(seed: int, index: int) -> int:
    """The seed of answer `index` of a request for several, signed 64 bits; answer 0 has the request's own.

    Each is a SplitMix64 output (Steele, Lea and Flood, 2014), so that neighbouring seeds share no answers.
    """
    bits = seed % 2**64
    if index:
        bits = (bits + index * 0x9E3779B97F4A7C15) % 2**64
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
        bits ^= bits >> 31
    return bits - 2**64 if bits >> 63 else bits


# ---- bodies that both sides build ----

ReloadCode = Literal["not_enabled", "bad_request", "cancelled", "timeout", "failed"]

NOT_ENABLED = "this server does not permit reloads; start it with --allow-reload-forward (development only)"


def reload_failure(
    call_id: str | None, code: ReloadCode, phase: str, error: str, *, rank: int | None = None
) -> dict[str, Any]:
    """The reply of a reload that changed nothing. `phase` is where it ended, `rank` whose failure that was."""
    return {
        "success": False,
        "id": call_id,
        "code": code,
        "phase": phase,
        "rank": rank,
        "error": error,
        "message": error,
    }
