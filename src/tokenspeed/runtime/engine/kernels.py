"""Which kernels a rank uses, and with which tactics: what the flags say, and what is timed at start-up."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from tokenspeed.runtime.cache.pool import KVShape
from tokenspeed.runtime.config import KernelOptions
from tokenspeed.runtime.distributed.channel import Channel
from tokenspeed.runtime.execution.capture_plan import CapturePlan
from tokenspeed.runtime.layers.embedding import VocabParallelEmbedding
from tokenspeed.runtime.layers.linear import Linear
from tokenspeed.runtime.models.base import CausalLM
from tokenspeed_kernel.ops.attention import plan_decode_attention, plan_extend_attention
from tokenspeed_kernel.ops.attention.backends import solutions_of
from tokenspeed_kernel.ops.gemm import linear
from tokenspeed_kernel.registry import REGISTRY
from tokenspeed_kernel.tactics import TACTICS, tactics_file
from tokenspeed_kernel.triton_language import AVAILABLE
from tokenspeed_kernel.tuning import tune_attention, tune_products
from tokenspeed_kernel.workloads import ModelShape, Workloads


def apply_flags(options: KernelOptions) -> None:
    """Have the registry follow --attention-backend and --kernel, of which the latter is the more exact.

    Raises:
        KernelError: a flag names what is not registered.
    """
    REGISTRY.overrides.flags.clear()
    if options.attention_backend != "auto":
        backend = options.attention_backend
        REGISTRY.overrides.set_flags(solutions_of(backend), f"--attention-backend {backend}")
    REGISTRY.permit(options.kernel or ())


def tune(
    options: KernelOptions,
    channel: Channel,
    model: CausalLM,
    kv: KVShape,
    plan: CapturePlan,
    max_context: int,
    device: torch.device,
    progress: Callable[[str], None],
) -> None:
    """Give every rank the tactics that rank 0 finds in its file, or by timing.

    All have the same, since another tactic may round otherwise. Without Triton there is nothing to tune.
    """
    if not AVAILABLE:
        return
    if channel.rank == 0:
        TACTICS.load(tactics_file())
        if options.tune_kernels:
            _time(model, channel.size, kv, plan, max_context, device, progress)
            torch.cuda.empty_cache()
        channel.broadcast(json.dumps(TACTICS.export()).encode())
    else:
        TACTICS.install(json.loads(channel.broadcast(None)))


def _time(
    model: CausalLM,
    ranks: int,
    kv: KVShape,
    plan: CapturePlan,
    max_context: int,
    device: torch.device,
    progress: Callable[[str], None],
) -> None:
    config = model.config
    shape = ModelShape(
        config.hidden_size,
        config.num_heads // ranks,
        kv.num_kv_heads,
        kv.head_dim,
        config.intermediate_size // ranks,
        config.vocab_size,
        kv.block_size,
    )
    tune_attention(
        TACTICS,
        Workloads(shape, device, kv.dtype),
        plan_decode_attention(device, kv.dtype, kv.head_dim),
        plan_extend_attention(device, kv.dtype, kv.head_dim),
        plan.decode,
        plan.prefill,
        max_context,
        progress,
    )
    tune_products(TACTICS, _products(model, device, kv.dtype), (*plan.decode, *plan.prefill), progress)


def _products(model: CausalLM, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[int], object]]:
    """One product of each size that the model has, with the weights of a layer and no collective."""

    def product(layer: Linear | VocabParallelEmbedding) -> Callable[[int], object]:
        in_size = layer.weight.shape[1]
        if isinstance(layer, Linear):
            return lambda rows: layer.project(torch.randn(rows, in_size, device=device, dtype=dtype), None)
        return lambda rows: linear(
            torch.randn(rows, in_size, device=device, dtype=dtype), layer.weight, kernel=layer.linear_kernel
        )

    return {
        "x".join(map(str, layer.weight.shape)): product(layer)
        for _, layer in model.named_layers()
        if isinstance(layer, Linear | VocabParallelEmbedding)
    }
