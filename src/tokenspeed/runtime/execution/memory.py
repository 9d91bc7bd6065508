"""How much GPU memory is left for the KV cache, measured before the cache is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenspeed.errors import ResourceError
from tokenspeed.runtime.execution.executor import Executor
from tokenspeed.runtime.execution.graphs.base import GraphKind
from tokenspeed.runtime.models.base import CausalLM
from tokenspeed_kernel.workspace import WORKSPACE


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one GPU."""

    total: int
    held: int
    """By weights, buffers, libraries and other processes, now."""
    step: int
    """What the largest eager step takes for a while."""
    graphs: int
    """What the executables of all captured steps will take; the memory pools are held already."""

    def left(self, utilization: float) -> int:
        """Bytes for the KV cache when `utilization` of the GPU may be used; negative when there are none."""
        return int(self.total * utilization) - self.held - self.step - self.graphs

    def __str__(self) -> str:
        parts = f"{gib(self.held)} held, {gib(self.step)} for a step, {gib(self.graphs)} for graphs"
        return f"{gib(self.total)} in all, {parts}"


def check_weights_fit(model: CausalLM, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a model whose weights alone are more than what is free.

    Raises:
        ResourceError: naming both.
    """
    needed = model.weight_bytes(dtype)
    free, _ = torch.cuda.mem_get_info(device)
    if needed > free:
        raise ResourceError(
            f"the weights take {gib(needed)} and the GPU has {gib(free)} free; raise --tensor-parallel-size, "
            "stop what else uses the GPU, or serve a smaller model"
        )


def measure(executor: Executor, generations: int, progress: Callable[[str], None]) -> MemoryUse:
    """Run and capture the largest steps on the scratch block, and drop them again; fixes the workspace.

    Args:
        executor: warmed, with a pool that has the scratch block at least.
        generations: of captured steps that will exist at once; with 0 their executables are not measured.
        progress: gets one line for each part.
    """
    device = executor.buffers.device
    progress("largest step")
    step = _peak(executor.run_largest, device)
    # The steps from here on are captured: what kernels share has its size now.
    progress(f"workspace {gib(WORKSPACE.freeze(device))}")
    ladders = _ladders(executor) if generations else []
    graphs = sum(_graph_bytes(executor, kind, sizes, generations, progress) for kind, sizes in ladders)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryUse(total, total - free, step, graphs)


def _ladders(executor: Executor) -> list[tuple[GraphKind, tuple[int, ...]]]:
    ladders: list[tuple[GraphKind, tuple[int, ...]]] = [("decode", executor.plan.decode)]
    ladders.append(("prefill", executor.plan.prefill))
    return [(kind, sizes) for kind, sizes in ladders if sizes]


def _peak(run: Callable[[], None], device: torch.device) -> int:
    """Bytes that `run` takes for a while."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _graph_bytes(
    executor: Executor, kind: GraphKind, sizes: tuple[int, ...], generations: int, progress: Callable[[str], None]
) -> int:
    """Bytes that the executables of all graphs of one kind will take; the pool of the largest serves all."""
    device = executor.buffers.device
    progress(f"largest {kind} graph")
    # The first one fills the pool and may load libraries; the second costs what each of the others will.
    first = executor.capture_one(kind, sizes[-1])
    reserved = torch.cuda.memory_reserved(device)
    free, _ = torch.cuda.mem_get_info(device)
    second = executor.capture_one(kind, sizes[-1])
    torch.cuda.synchronize(device)
    grown = torch.cuda.memory_reserved(device) - reserved
    executable = max(0, free - torch.cuda.mem_get_info(device)[0] - grown)
    del first, second
    return executable * len(sizes) * generations


def gib(count: int) -> str:
    """Bytes for people."""
    return f"{count / (1 << 30):.2f} GiB"
