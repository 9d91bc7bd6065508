"""One tree of frozen dataclasses that holds every setting; `tokenspeed.cli.flags` makes the flags from it.

Only the standard library is imported here, because the command line starts from this file.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any

from tokenspeed.errors import ConfigError

DEFAULT_DECODE_SIZES = (1, 2, 4, *range(8, 257, 8))
"""Batch sizes whose decode step is captured unless --cudagraph-capture-sizes says otherwise."""

DEFAULT_CPU_DECODE_SIZES = (1, 2, 4, 8)
"""The same for --cpu-graphs: a recorded step is there to try reloads with, and saves no time."""

SMALLEST_PREFILL_BUCKET = 16
"""Tokens of the smallest captured prefill."""

MOST_SEQS = 2**16
MOST_BATCHED_TOKENS = 2**20
"""A rank reserves buffers for a step of so many requests and tokens before it serves."""

MOST_RANKS = 64
"""A rank is a process of its own, and all of them run on one machine."""

LARGEST = 2**31 - 1
"""Bound of every other setting that counts something: far above what any machine has, and safe in 32 bits."""


def option(
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    negations: tuple[str, ...] = (),
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that becomes a flag: `max_num_seqs` is spelled `--max-num-seqs`.

    A field whose default is a bool becomes `--name` / `--no-name`; a tuple takes several values. `aliases` are
    the names that other engines give the same thing, and `negations` those that they give its opposite.
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "aliases": aliases,
            "negations": negations,
            "choices": choices,
            "metavar": metavar,
        },
    )


@dataclass(frozen=True)
class ModelOptions:
    """Which model is served, and in what form."""

    model: str = option(
        "",
        "Hugging Face directory, .gguf file, hub id such as org/name, or the name smollm2",
        aliases=("--model-path",),
        metavar="MODEL",
    )
    revision: str | None = option(
        None, "branch, tag or commit of a hub id (default: its main branch)", metavar="REVISION"
    )
    served_model_name: str | None = option(None, "name that clients use (default: the model argument)", metavar="NAME")
    dtype: str = option(
        "auto",
        "type of weights and activations; auto is float32 on a CPU and the checkpoint's own elsewhere",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str = option("auto", "where the model runs; auto is a GPU if there is one", choices=("auto", "cpu", "cuda"))
    load_format: str = option(
        "auto",
        "form of the weights; dummy fills them with random numbers and needs only config.json",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    max_model_len: int | None = option(
        None,
        "longest prompt plus answer in tokens (default: the model's own)",
        aliases=("--context-length",),
        metavar="TOKENS",
    )
    seed: int = option(
        0,
        "seed of dummy weights, and of the seeds given to requests that bring none",
        aliases=("--random-seed",),
        metavar="N",
    )


@dataclass(frozen=True)
class SchedulerOptions:
    """How requests become batches."""

    max_num_seqs: int = option(256, "requests that may run at once", aliases=("--max-running-requests",), metavar="N")
    max_num_batched_tokens: int = option(2048, "tokens of one step, prefill and decode together", metavar="TOKENS")
    max_queued_requests: int | None = option(
        None,
        "requests that may wait beyond the --max-num-seqs that run; more get status 429 (default: no limit)",
        metavar="N",
    )


@dataclass(frozen=True)
class CacheOptions:
    """The KV cache."""

    block_size: int = option(
        16, "tokens of one KV block; also the unit of prefix matching", aliases=("--page-size",), metavar="TOKENS"
    )
    max_total_tokens: int | None = option(
        None, "tokens of the KV cache (default: what the memory allows)", metavar="TOKENS"
    )
    gpu_memory_utilization: float = option(
        0.9,
        "part of a GPU's memory that the server may use, weights and graphs included",
        aliases=("--mem-fraction-static",),
        metavar="FRACTION",
    )
    enable_prefix_caching: bool = option(
        True, "reuse the KV of earlier prompts that start alike", negations=("--disable-radix-cache",)
    )


@dataclass(frozen=True)
class GraphOptions:
    """Captured steps: CUDA graphs on a GPU, recorded steps on a CPU."""

    enforce_eager: bool = option(False, "capture nothing, run every step eagerly", aliases=("--disable-cuda-graph",))
    cpu_graphs: bool = option(False, "on a CPU, record steps and replay them as a GPU replays its graphs")
    cudagraph_capture_sizes: tuple[int, ...] | None = option(
        None,
        "decode batch sizes to capture (default: 1 2 4 and multiples of 8 up to 256, on a CPU 1 2 4 8)",
        aliases=("--cuda-graph-bs",),
        metavar="N",
    )
    prefill_graph_max_tokens: int | None = option(
        None,
        "largest prefill to capture, in tokens, from 16; 0 captures none (default: 2048, on a CPU 0)",
        metavar="TOKENS",
    )


@dataclass(frozen=True)
class KernelOptions:
    """Which kernels the layers use; `ts kernels` lists them."""

    attention_backend: str = option(
        "auto",
        "kernels of attention, and with them the layout of the KV cache; auto is the fastest that is installed",
        choices=("auto", "triton", "torch", "flash_attn"),
    )
    kernel: tuple[str, ...] | None = option(
        None, "solutions to use whatever their priority, such as norm.rms_norm=reference", metavar="OPERATION=SOLUTION"
    )
    tune_kernels: bool = option(
        True, "on a GPU, time the variants of kernels at the first start, and keep the best ones in TOKENSPEED_CACHE"
    )


@dataclass(frozen=True)
class ParallelOptions:
    """How the model is spread over ranks."""

    tensor_parallel_size: int = option(
        1, "ranks that share every layer", aliases=("-tp", "--tp", "--tp-size"), metavar="N"
    )


@dataclass(frozen=True)
class ReloadOptions:
    """Editing the forward pass while the server runs (development only)."""

    allow_reload_forward: bool = option(
        False, "permit reload_forward; for development only, never enable it in production"
    )
    reload_overlay: str | None = option(
        None, "directory, laid out as the packages, whose modules are read before the installed ones", metavar="DIR"
    )
    reload_check_finite: bool = option(
        True, "refuse an edit whose dummy steps give NaN or infinity where those of the code before gave numbers"
    )
    reload_rank_timeout: float = option(
        60.0,
        "seconds that a rank may stand still in a reload, without a launch, a compile or a graph, before the ranks are "
        "replaced",
        metavar="SECONDS",
    )


@dataclass(frozen=True)
class ControlOptions:
    """The engine's own HTTP control address."""

    rl_control_host: str = option("127.0.0.1", "address of the control app", metavar="ADDRESS")
    rl_control_port: int = option(0, "port of the control app; 0 picks a free one", metavar="PORT")


@dataclass(frozen=True)
class ServeOptions:
    """The public address, and how the processes start and stop."""

    host: str | None = option(
        None,
        "public address (default: 0.0.0.0; 127.0.0.1 with --allow-reload-forward and no --api-key)",
        metavar="ADDRESS",
    )
    port: int = option(8000, "public port; 0 picks a free one", metavar="PORT")
    api_key: str | None = option(
        None, "key that clients of the public address must send as bearer token", metavar="KEY"
    )
    enable_rl: bool = option(False, "serve the /v1/rl control routes (--allow-reload-forward implies it)")
    report_generation: bool = option(
        False, "tell the number of the reload that computed an answer with its weight version, as in default+g3"
    )
    drain_timeout: float = option(30.0, "seconds that running requests get to finish at a stop", metavar="SECONDS")
    health_timeout: float = option(
        30.0,
        "seconds without a sign of life of a rank after which the server calls itself unhealthy",
        metavar="SECONDS",
    )
    start_timeout: float = option(
        600.0,
        "seconds that ranks which start may stand still, without a module, a weight, a compile or a graph, before the "
        "start has failed; 0 waits for ever",
        metavar="SECONDS",
    )
    step_timeout: float = option(
        300.0,
        "seconds that a step may stand still, without a launch or a collective, before the ranks are replaced; 0 never "
        "replaces them for it",
        metavar="SECONDS",
    )
    log_level: str = option("info", "least severe message to print", choices=("debug", "info", "warning", "error"))
    nvtx: bool = option(
        False,
        "on a GPU, mark steps, their phases and layers with NVTX ranges for a profiler",
        aliases=("--enable-layerwise-nvtx-tracing",),
    )


@dataclass(frozen=True)
class Config:
    """Every setting of one server."""

    model: ModelOptions = field(default_factory=ModelOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    graphs: GraphOptions = field(default_factory=GraphOptions)
    kernels: KernelOptions = field(default_factory=KernelOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    reload: ReloadOptions = field(default_factory=ReloadOptions)
    control: ControlOptions = field(default_factory=ControlOptions)
    serve: ServeOptions = field(default_factory=ServeOptions)


def option_fields(config_type: type = Config) -> list[tuple[str, Field[Any]]]:
    """Every option as (group, field), in the order of the tree; the group is the attribute of `Config`."""
    groups: list[tuple[str, Any]] = [(group.name, group.default_factory) for group in fields(config_type)]
    return [(name, leaf) for name, group in groups if is_dataclass(group) for leaf in fields(group)]


def validate(config: Config) -> None:
    """Refuse settings that cannot work, before a process is started.

    Raises:
        ConfigError: with one sentence that names the flag and what to give it.
    """
    _between("--max-num-seqs", config.scheduler.max_num_seqs, 1, MOST_SEQS)
    _between("--max-num-batched-tokens", config.scheduler.max_num_batched_tokens, 1, MOST_BATCHED_TOKENS)
    if config.scheduler.max_queued_requests is not None:
        _at_least("--max-queued-requests", config.scheduler.max_queued_requests, 0)
    _at_least("--block-size", config.cache.block_size, 1)
    _between("--tensor-parallel-size", config.parallel.tensor_parallel_size, 1, MOST_RANKS)
    # One token of prompt and one of answer.
    for flag, value in (
        ("--max-model-len", config.model.max_model_len),
        ("--max-total-tokens", config.cache.max_total_tokens),
    ):
        if value is not None:
            _at_least(flag, value, 2)
    if config.graphs.prefill_graph_max_tokens not in (None, 0):
        _at_least("--prefill-graph-max-tokens", config.graphs.prefill_graph_max_tokens, SMALLEST_PREFILL_BUCKET)
    if not 0 < config.cache.gpu_memory_utilization <= 1:
        raise ConfigError("--gpu-memory-utilization must be above 0 and at most 1")
    if not 0 <= config.serve.drain_timeout <= LARGEST:
        raise ConfigError(f"--drain-timeout must be between 0 and {LARGEST} seconds")
    if not 0 < config.serve.health_timeout <= LARGEST:
        raise ConfigError(f"--health-timeout must be above 0 and at most {LARGEST} seconds")
    for flag, seconds in (
        ("--start-timeout", config.serve.start_timeout),
        ("--step-timeout", config.serve.step_timeout),
    ):
        if not 0 <= seconds <= LARGEST:
            raise ConfigError(f"{flag} must be between 0 and {LARGEST} seconds")
    if not -(2**63) <= config.model.seed < 2**64:
        raise ConfigError("--seed must fit into 64 bits")
    for flag, port in (("--port", config.serve.port), ("--rl-control-port", config.control.rl_control_port)):
        if not 0 <= port <= 65535:
            raise ConfigError(f"{flag} must be between 0 and 65535, not {port}")
    if config.serve.api_key is not None and not config.serve.api_key.strip():
        raise ConfigError("--api-key is empty; give a key, or leave the flag out to serve everybody")
    for assignment in config.kernels.kernel or ():
        operation, equals, solution = assignment.partition("=")
        if not equals or not solution or operation.count(".") != 1:
            raise ConfigError(f"--kernel takes OPERATION=SOLUTION, such as norm.rms_norm=reference, not {assignment}")
    _validate_graphs(config)
    if not 0 < config.reload.reload_rank_timeout <= LARGEST:
        raise ConfigError(f"--reload-rank-timeout must be above 0 and at most {LARGEST} seconds")
    if config.reload.reload_overlay is not None and not config.reload.allow_reload_forward:
        raise ConfigError("--reload-overlay needs --allow-reload-forward")


def _validate_graphs(config: Config) -> None:
    graphs = config.graphs
    if graphs.enforce_eager and graphs.cpu_graphs:
        raise ConfigError("--enforce-eager and --cpu-graphs exclude each other; give one of them")
    sizes = graphs.cudagraph_capture_sizes
    if sizes is None:
        return
    if not sizes:
        raise ConfigError("--cudagraph-capture-sizes needs at least one size; use --enforce-eager to capture none")
    for size in sizes:
        _at_least("--cudagraph-capture-sizes", size, 1)
    if max(sizes) > config.scheduler.max_num_seqs:
        raise ConfigError(
            f"--cudagraph-capture-sizes has {max(sizes)}, above --max-num-seqs {config.scheduler.max_num_seqs}; "
            "raise the latter or drop the size"
        )


def _at_least(flag: str, value: int, least: int) -> None:
    _between(flag, value, least, LARGEST)


def _between(flag: str, value: int, least: int, most: int) -> None:
    if value < least:
        raise ConfigError(f"{flag} must be {least} or more, not {value}")
    if value > most:
        raise ConfigError(f"{flag} must be {most} or less, not {value}")
