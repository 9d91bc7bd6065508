"""Builds one rank: model, weights, KV cache, warm-up, graphs, in that order."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import psutil
import torch

from tokenspeed.errors import ConfigError, ModelError, ResourceError
from tokenspeed.forward import FORWARD_PACKAGES
from tokenspeed.runtime.cache.manager import KVCacheManager
from tokenspeed.runtime.cache.pool import KVPool, KVShape, plan_blocks
from tokenspeed.runtime.config import Config
from tokenspeed.runtime.distributed.channel import Channel
from tokenspeed.runtime.distributed.world import join
from tokenspeed.runtime.engine.outbox import Outbox
from tokenspeed.runtime.execution.buffers import BatchBuffers, BufferLimits
from tokenspeed.runtime.execution.capture_plan import plan_capture
from tokenspeed.runtime.execution.executor import Executor
from tokenspeed.runtime.execution.graphs.cpu import CpuGraphBackend
from tokenspeed.runtime.loader.source import ModelSource, resolve
from tokenspeed.runtime.loader.weights import load_weights
from tokenspeed.runtime.models.base import CausalLM
from tokenspeed.runtime.models.registry import build_model
from tokenspeed.runtime.protocol import EngineInfo, Starting
from tokenspeed.runtime.sampling.sampler import Sampler
from tokenspeed.runtime.scheduler.limits import SchedulerLimits
from tokenspeed.runtime.scheduler.scheduler import Scheduler


class Startup:
    """Does the start-up phases of one rank and times them; `executor`, `scheduler` and `info` are the outcome."""

    def __init__(self, config: Config, channel: Channel, outbox: Outbox):
        self.config = config
        self.channel = channel
        self.outbox = outbox
        self.seconds: dict[str, float] = {}

    def run(self) -> None:
        """Go through all phases.

        Raises:
            TokenSpeedError: with one sentence for the user.
        """
        self.device = pick_device(self.config.model.device)
        with self._phase("resolve"):
            self.source = self._resolve()
            self.max_model_len = longest_request(self.config, self.source)
        with self._phase("build"):
            self._limit_threads()
            self.group = join(self.channel.rank, self.channel.size, self.channel.run_dir)
            self.dtype = pick_dtype(self.config.model.dtype, self.source.config.torch_dtype, self.device)
            model = build_model(self.source.config, self.group)
            model.materialize(self.device, self.dtype)
        with self._phase("load"):
            load_weights(model, self.source, self.config.model.seed, self.device, self.dtype)
            model.plan(self.device, self.dtype)
        with self._phase("kv"):
            self.pool = self._allocate_kv(model)
        self.executor = self._executor(model)
        with self._phase("warm") as progress:
            self.executor.warm(progress)
        with self._phase("graphs") as progress:
            self.executor.generation = self.executor.capture(0, progress)
        self.scheduler = self._scheduler()
        # What start-up made lives as long as the process; later collections need not walk it.
        gc.collect()
        gc.freeze()

    def info(self) -> EngineInfo:
        """What is served, for the front."""
        source, generation = self.source, self.executor.generation
        return EngineInfo(
            model_path=str(source.path),
            tokenizer_path=str(source.tokenizer_dir),
            model_type=source.config.model_type,
            architectures=(source.config.architecture,),
            vocab_size=source.config.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=source.config.eos_token_ids,
            bos_token_id=source.config.bos_token_id,
            pad_token_id=source.config.pad_token_id,
            dtype=str(self.dtype).removeprefix("torch."),
            device=self.device.type,
            tensor_parallel_size=self.channel.size,
            block_size=self.pool.shape.block_size,
            num_blocks=self.pool.num_blocks - 1,
            default_sampling=dict(source.default_sampling),
            decode_graphs=tuple(generation.decode),
            prefill_graphs=tuple(generation.prefill),
            startup={name: round(seconds, 3) for name, seconds in self.seconds.items()},
        )

    def _resolve(self) -> ModelSource:
        """Rank 0 may have to fetch the model; the others wait and then take what it found."""
        if self.channel.rank != 0:
            path = os.fsdecode(self.channel.broadcast(None))
            return resolve(replace(self.config.model, model=path, revision=None), lambda _: None)
        source = resolve(self.config.model, self._say("resolve"))
        if source.tokenizer_dir is None:
            raise ModelError(
                f"{source.path} has no tokenizer, which the gateway needs; put the model's tokenizer.json there"
            )
        self.channel.broadcast(os.fsencode(source.path))
        return source

    def _allocate_kv(self, model: CausalLM) -> KVPool:
        shape = KVShape(
            num_layers=model.config.num_layers,
            num_kv_heads=model.config.local_kv_heads(self.channel.size),
            head_dim=model.config.head_dim,
            block_size=self.config.cache.block_size,
            dtype=self.dtype,
        )
        # Every rank plans with rank 0's view of the memory, so that all have as many blocks.
        free = int(self.channel.broadcast(str(self._free_bytes()).encode() if self.channel.rank == 0 else None))
        blocks = plan_blocks(
            shape, self.config.cache.max_total_tokens, self.max_model_len, self.config.scheduler.max_num_seqs, free
        )
        pool = KVPool(shape, blocks + 1, self.device)
        pool.allocate()
        return pool

    def _free_bytes(self) -> int:
        """Memory that one of the ranks of this machine may take."""
        available: int = psutil.virtual_memory().available
        return available // self.channel.size

    def _executor(self, model: CausalLM) -> Executor:
        scheduler = self.config.scheduler
        limits = BufferLimits(
            max_tokens=max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs),
            max_rows=scheduler.max_num_seqs,
            max_blocks_per_row=-(-self.max_model_len // self.config.cache.block_size),
        )
        buffers = BatchBuffers(limits, self.config.cache.block_size, self.device)
        buffers.allocate()
        plan = plan_capture(self.config, self.device.type)
        executor = Executor(model, Sampler(), self.pool, buffers, plan, lambda: CpuGraphBackend(FORWARD_PACKAGES))
        executor.allocate(self.source.config.vocab_size, self.source.config.hidden_size, self.dtype)
        return executor

    def _scheduler(self) -> Scheduler:
        limits = SchedulerLimits(
            max_num_seqs=self.config.scheduler.max_num_seqs,
            max_num_batched_tokens=self.config.scheduler.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=self.config.cache.block_size,
            eos_token_ids=self.source.config.eos_token_ids,
        )
        cache = KVCacheManager(
            num_blocks=self.pool.num_blocks - 1,
            block_size=self.config.cache.block_size,
            enable_prefix_caching=self.config.cache.enable_prefix_caching,
        )
        return Scheduler(limits, cache)

    def _limit_threads(self) -> None:
        """Share the cores between the ranks of one machine, unless the user has said how."""
        if self.device.type == "cpu" and self.channel.size > 1 and "OMP_NUM_THREADS" not in os.environ:
            # torch's own number counts the cores that this process may use, not those of the machine.
            torch.set_num_threads(max(1, torch.get_num_threads() // self.channel.size))

    @contextmanager
    def _phase(self, name: str) -> Iterator[Callable[[str], None]]:
        say = self._say(name)
        say("")
        started = time.perf_counter()
        yield say
        self.seconds[name] = time.perf_counter() - started

    def _say(self, phase: str) -> Callable[[str], None]:
        return lambda detail: self.outbox.send(Starting(phase=phase, detail=detail))


def pick_device(asked: str) -> torch.device:
    """The device to run on.

    Raises:
        ConfigError: for a device that this version does not serve on.
        ResourceError: for a device that is not there.
    """
    if asked == "cuda":
        if not torch.cuda.is_available():
            raise ResourceError("--device cuda finds no CUDA device; use --device cpu")
        raise ConfigError("--device cuda is not served yet; use --device cpu")
    return torch.device("cpu")


def pick_dtype(asked: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """Type of weights and activations; auto is float32 on a CPU and the checkpoint's type elsewhere."""
    name = asked if asked != "auto" else ("float32" if device.type == "cpu" else checkpoint)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def longest_request(config: Config, source: ModelSource) -> int:
    """Most tokens of one request, prompt and answer together.

    Raises:
        ConfigError: when --max-model-len is more than the model was made for.
    """
    asked, most = config.model.max_model_len, source.config.max_position
    if asked is not None and asked > most:
        raise ConfigError(f"--max-model-len {asked} is more than the {most} positions of the model; lower it")
    return asked or most
