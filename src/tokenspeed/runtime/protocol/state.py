"""What the front knows of an engine: what it serves, what it holds, what it runs, how far its ranks are."""

from __future__ import annotations

import msgspec

from tokenspeed.runtime.protocol.message import Message

FIRST_WEIGHT_VERSION = "default"
"""Version of the weights that a server starts with."""


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
    held: bool = False
    """The pause holds the running requests too."""
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
    weights_kept: bool = False
    """The weights are those that lost ranks have left in memory; nothing was loaded."""


class ReloadStatus(Message, frozen=True):
    """Where a reload stands; sent at every change of state."""

    state: str
    generation: int
    id: str | None = None
    by: str | None = None
    detail: str = ""


class ModuleCode(msgspec.Struct, frozen=True, kw_only=True):
    """A module as it runs: the bytes of its source, the file they came from, and the installed file."""

    path: str
    data: bytes
    origin: str


SIGN_INTERVAL_S = 1.0
"""Seconds between two signs of a rank."""


A_DOWNLOAD = "a download"
"""What rank 0 waits for while a model is fetched: whoever fetches has limits of his own."""


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
