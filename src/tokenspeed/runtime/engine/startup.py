"""Builds one rank: model, weights, KV cache, warm-up, graphs, in that order."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import psutil
import torch

from tokenspeed.errors import ConfigError, ModelError, ResourceError
from tokenspeed.forward import FORWARD_PACKAGES
from tokenspeed.runtime.cache.manager import KVCacheManager
from tokenspeed.runtime.cache.pool import KVPool, KVShape, MemoryBudget, plan_blocks, plan_scratch
from tokenspeed.runtime.config import Config
from tokenspeed.runtime.distributed.channel import Channel
from tokenspeed.runtime.distributed.world import World
from tokenspeed.runtime.engine.kernels import apply_flags, tune
from tokenspeed.runtime.engine.outbox import Outbox
from tokenspeed.runtime.execution.buffers import BatchBuffers, BufferLimits
from tokenspeed.runtime.execution.capture_plan import plan_capture
from tokenspeed.runtime.execution.device import missing_parts, pick_device, pick_dtype
from tokenspeed.runtime.execution.dummies import see_nothing
from tokenspeed.runtime.execution.executor import Executor
from tokenspeed.runtime.execution.generation import Generation
from tokenspeed.runtime.execution.graphs.base import GraphBackend
from tokenspeed.runtime.execution.graphs.cpu import CpuGraphBackend
from tokenspeed.runtime.execution.graphs.cuda import CudaGraphBackend, open_graph_memory
from tokenspeed.runtime.execution.graphs.cuda_nodes import NodeReader
from tokenspeed.runtime.execution.graphs.triton_modules import KernelModules
from tokenspeed.runtime.execution.memory import check_weights_fit, measure
from tokenspeed.runtime.execution.ranges import Ranges
from tokenspeed.runtime.loader.kept import KeptWeights, plan_layout
from tokenspeed.runtime.loader.source import ModelSource, resolve
from tokenspeed.runtime.loader.weights import load_weights
from tokenspeed.runtime.models.base import CausalLM
from tokenspeed.runtime.models.registry import build_model
from tokenspeed.runtime.protocol.reports import Starting
from tokenspeed.runtime.protocol.state import FIRST_WEIGHT_VERSION, EngineInfo
from tokenspeed.runtime.reload.finite import Finiteness, Observation
from tokenspeed.runtime.sampling.sampler import Sampler
from tokenspeed.runtime.scheduler.limits import SchedulerLimits
from tokenspeed.runtime.scheduler.scheduler import Scheduler
from tokenspeed_kernel.jit import count_compiles
from tokenspeed_kernel.ops.attention import plan_decode_attention
from tokenspeed_kernel.ops.attention.backends import order_of
from tokenspeed_kernel.progress import PROGRESS
from tokenspeed_kernel.registry import REGISTRY
from tokenspeed_kernel.tactics import TACTICS
from tokenspeed_kernel.workspace import WORKSPACE


class Startup:
    """Does the start-up phases of one rank and times them; `executor`, `scheduler` and `info` are the outcome.

    `generation` is the number of the code that runs: that of other ranks, where this one takes their place. `tactics`
    are theirs, and None for a first rank. `kept` is where their weights may be; None where nobody keeps them.
    """

    def __init__(
        self,
        config: Config,
        channel: Channel,
        outbox: Outbox,
        generation: int = 0,
        tactics: Mapping[str, Any] | None = None,
        kept: KeptWeights | None = None,
    ):
        self.config = config
        self.channel = channel
        self.outbox = outbox
        self.generation = generation
        self.tactics = tactics
        self.kept = kept
        self.weights_kept = False
        """Whether the weights are those that lost ranks have left."""
        self.seconds: dict[str, float] = {}
        self.executor: Executor
        reload = config.reload
        self.finiteness = Finiteness() if reload.allow_reload_forward and reload.reload_check_finite else None
        """What the dummy steps gave, for reloads that compare theirs."""

    def run(self) -> None:
        """Go through all phases.

        Raises:
            TokenSpeedError: with one sentence for the user.
        """
        with count_compiles() as self.jit:
            self._run()
        # What start-up made lives as long as the process; later collections need not walk it.
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        """Drop what was captured, then leave the other ranks; the loop is over."""
        self.executor.install(Generation(0, {}, {}))
        self.world.leave()

    def _run(self) -> None:
        with self._phase("device") as progress:
            self.device = pick_device(self.config.model.device, self.channel.rank, self.channel.size)
            for sentence in missing_parts(self.device, self.config.model.device):
                progress(sentence)
            apply_flags(self.config.kernels)
            self.wishes = REGISTRY.overrides.now()
        with self._phase("resolve"):
            found = self.kept is not None and self.kept.fetch()
            self.source = self._resolve(need_weights=not found)
            self.source.config.check_tensor_parallel(self.channel.size)
            self.max_model_len = longest_request(self.config, self.source)
        with self._phase("build"):
            self._limit_threads()
            self.world = World(self.channel.rank, self.channel.size, self.channel.run_dir, self.device)
            self.world.join()
            if self.config.reload.allow_reload_forward:
                self.world.make_spare()
            self.dtype = pick_dtype(self.config.model.dtype, self.source.config.torch_dtype, self.device)
            model = build_model(self.source.config, self.world.group)
        with self._phase("load") as progress:
            self._fill(model, progress)
            model.plan(self.device, self.dtype)
        self.shape = self._kv_shape(model)
        if self.device.type == "cuda":
            WORKSPACE.reopen(self.device)
            with self._phase("tune") as progress:
                self._tune(model, progress)
            budget = self._prepare_gpu(model)
        else:
            budget = MemoryBudget.of_host(psutil.virtual_memory().available // self.channel.size)
        with self._phase("kv") as progress:
            pool = self._allocate_kv(budget)
            progress(f"{pool.usable_blocks * pool.shape.block_size} tokens")
        if self.device.type == "cuda":
            self.executor.pool = pool
        else:
            self.executor = self._executor(model, pool)
            self._warm()
        with self._phase("graphs") as progress, self.world.group.recording("graphs"):
            self.executor.generation = self.executor.capture(self.generation, progress)
            if self.config.reload.allow_reload_forward:
                self.executor.generation.read_nodes()
        if self.finiteness is not None:
            seen = Observation()
            self.executor.replay_largest(self.executor.generation, seen.look)
            self.finiteness.accept(seen)
        self.scheduler = self._scheduler()

    def _fill(self, model: CausalLM, progress: Callable[[str], None]) -> None:
        """Give the model its weights, where possible those of the ranks before."""
        kept, layout = self.kept, plan_layout(model, self.dtype, self.device)
        # All ranks have the weights of one load, since edited code may load others.
        self.weights_kept = kept is not None and all(self.channel.exchange(b"y" if kept.attach(layout) else b""))
        if kept is not None and self.weights_kept:
            progress("weights that were kept")
            model.materialize(self.device, self.dtype, kept.tensors())
            model.process()
            return
        can_keep = kept is not None and kept.prepare(layout, partial(self._check_weights_fit, model))
        if not can_keep:
            self._check_weights_fit(model)
        model.materialize(self.device, self.dtype, kept.tensors() if kept is not None and can_keep else None)
        load_weights(model, self.source, self.config.model.seed, self.device, self.dtype)
        if kept is not None and can_keep:
            kept.seal()

    def _check_weights_fit(self, model: CausalLM) -> None:
        if self.device.type == "cuda":
            check_weights_fit(model, self.dtype, self.device)

    def _warm(self) -> None:
        seen = Observation()
        with self._phase("warm") as progress, self.world.group.recording("warm"):
            self.executor.warm(progress, see_nothing if self.finiteness is None else seen.look)
        if self.finiteness is not None:
            self.finiteness.accept(seen)

    def _prepare_gpu(self, model: CausalLM) -> MemoryBudget:
        """Warm up on a pool that is nothing but the scratch block, and measure what is left for the real one."""
        scratch = KVPool(self.shape, 0, self.device)
        scratch.allocate()
        self.executor = self._executor(model, scratch)
        self._warm()
        with self._phase("measure") as progress:
            generations = 2 if self.config.reload.allow_reload_forward else 1
            if self.tactics is not None:
                generations = 0  # the size of the cache is known: all has fitted once
            use = measure(self.executor, generations, progress)
            progress(str(use))
        return MemoryBudget(use.left(self.config.cache.gpu_memory_utilization), use.left(1.0))

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
            num_blocks=self.pool.usable_blocks,
            default_sampling=dict(source.default_sampling),
            decode_graphs=tuple(generation.decode),
            prefill_graphs=tuple(generation.prefill),
            startup={name: round(seconds, 3) for name, seconds in self.seconds.items()},
            kernels_compiled=self.jit.compiled,
            kernels_compiled_seconds=round(self.jit.seconds, 3),
            weights_kept=self.weights_kept,
        )

    def _resolve(self, need_weights: bool) -> ModelSource:
        """Rank 0 may have to fetch the model; the others wait and then take what it found."""
        if self.channel.rank != 0:
            path = os.fsdecode(self.channel.broadcast(None))
            return resolve(replace(self.config.model, model=path, revision=None), lambda _: None, need_weights)
        source = resolve(self.config.model, self._say("resolve"), need_weights)
        if source.tokenizer_dir is None:
            raise ModelError(
                f"{source.path} has no tokenizer, which the gateway needs; put the model's tokenizer.json there"
            )
        self.channel.broadcast(os.fsencode(source.path))
        return source

    def _tune(self, model: CausalLM, progress: Callable[[str], None]) -> None:
        if self.tactics is not None:
            TACTICS.install(self.tactics)  # others might round otherwise
            return
        plan = plan_capture(self.config, self.device.type)
        tune(self.config.kernels, self.channel, model, self.shape, plan, self.max_model_len, self.device, progress)

    def _kv_shape(self, model: CausalLM) -> KVShape:
        return KVShape(
            num_layers=model.config.num_layers,
            num_kv_heads=model.config.local_kv_heads(self.channel.size),
            head_dim=model.config.head_dim,
            block_size=self.config.cache.block_size,
            dtype=self.dtype,
            order=order_of(plan_decode_attention(self.device, self.dtype, model.config.head_dim)),
        )

    def _allocate_kv(self, budget: MemoryBudget) -> KVPool:
        # All ranks have as many blocks as the one with the least memory can have.
        budgets = self.channel.exchange(msgspec.msgpack.encode(budget))
        smallest = MemoryBudget.smallest(msgspec.msgpack.decode(each, type=MemoryBudget) for each in budgets)
        scratch = plan_scratch(self.shape, self._dummy_tokens(), self.config.cache.max_total_tokens, smallest)
        blocks = plan_blocks(
            self.shape,
            self.config.cache.max_total_tokens,
            self.max_model_len,
            self.config.scheduler.max_num_seqs,
            smallest,
            scratch,
        )
        self.pool = KVPool(self.shape, blocks, self.device, scratch)
        self.pool.allocate()
        return self.pool

    def _dummy_tokens(self) -> int:
        """Tokens of dummy steps that are to have slots of their own: a reload compares steps, a start does not."""
        plan = plan_capture(self.config, self.device.type)
        return max((1, *plan.decode, *plan.prefill)) if self.config.reload.allow_reload_forward else 1

    def _executor(self, model: CausalLM, pool: KVPool) -> Executor:
        scheduler = self.config.scheduler
        limits = BufferLimits(
            max_tokens=max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs),
            max_rows=scheduler.max_num_seqs,
            max_blocks_per_row=-(-self.max_model_len // self.config.cache.block_size),
        )
        buffers = BatchBuffers(limits, self.config.cache.block_size, self.device)
        buffers.allocate()
        plan = plan_capture(self.config, self.device.type)
        on_gpu = self.device.type == "cuda"
        ranges = Ranges(on_gpu and self.config.serve.nvtx)
        ranges.around_layers(model)
        make_backend, modules = self._graph_backends()
        executor = Executor(model, Sampler(), pool, buffers, plan, make_backend, on_gpu, ranges, modules)
        executor.allocate(self.source.config.vocab_size, self.source.config.hidden_size, self.dtype)
        return executor

    def _graph_backends(self) -> tuple[Callable[[], GraphBackend], KernelModules | None]:
        """What makes the backend of each generation, and what of kernels is on a GPU."""
        if self.device.type != "cuda":
            return lambda: CpuGraphBackend(FORWARD_PACKAGES), None
        memory, reader = open_graph_memory(self.device), NodeReader()
        if not reader.open():
            self._say("warm")(
                "cuda-bindings is not installed: graphs are served but not listed; install tokenspeed[gpu]"
            )
        modules = KernelModules(reader, FORWARD_PACKAGES)
        return lambda: CudaGraphBackend(memory, FORWARD_PACKAGES, reader), modules

    def _scheduler(self) -> Scheduler:
        limits = SchedulerLimits(
            max_num_seqs=self.config.scheduler.max_num_seqs,
            max_num_batched_tokens=self.config.scheduler.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=self.config.cache.block_size,
            eos_token_ids=self.source.config.eos_token_ids,
        )
        cache = KVCacheManager(
            num_blocks=self.pool.usable_blocks,
            block_size=self.config.cache.block_size,
            enable_prefix_caching=self.config.cache.enable_prefix_caching,
        )
        scheduler = Scheduler(limits, cache)
        scheduler.reseed_cache(self.generation, FIRST_WEIGHT_VERSION)
        return scheduler

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
        try:
            yield say
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"the GPU's memory ran out in start-up phase {name}; lower --max-num-batched-tokens, --max-num-seqs or "
                "--gpu-memory-utilization, raise --tensor-parallel-size, or stop what else uses the GPU"
            ) from error
        self.seconds[name] = time.perf_counter() - started

    def _say(self, phase: str) -> Callable[[str], None]:
        def say(detail: str) -> None:
            PROGRESS.step(f"{phase} {detail}".rstrip())
            self.outbox.send(Starting(phase=phase, detail=detail))

        return say


def longest_request(config: Config, source: ModelSource) -> int:
    """Most tokens of one request, prompt and answer together.

    Raises:
        ConfigError: when --max-model-len is more than the model was made for.
    """
    asked, most = config.model.max_model_len, source.config.max_position
    if asked is not None and asked > most:
        raise ConfigError(f"--max-model-len {asked} is more than the {most} positions of the model; lower it")
    return asked or most
