"""Kernels exchanged in captured graphs, up to the driver's calls: compiled for a Hopper GPU that is not there."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the extra [gpu] is not installed")
import triton

from tests.tokenspeed_kernel.hopper import Hopper, hopper
from tests.tokenspeed_reload.conftest import Project
from tokenspeed.runtime.execution.graphs.base import BodyEdit, CannotSwap, CaptureError, EditedKernel
from tokenspeed.runtime.execution.graphs.cuda import CudaGraph
from tokenspeed.runtime.execution.graphs.cuda_nodes import NodeReader
from tokenspeed.runtime.execution.graphs.cuda_swap import CudaSwap, CudaSwapper
from tokenspeed.runtime.execution.graphs.triton_compile import compile_all, specialisations_of
from tokenspeed.runtime.execution.graphs.triton_kernels import loaded_kernels
from tokenspeed.runtime.execution.graphs.triton_modules import KernelModules
from tokenspeed_kernel import triton_run
from tokenspeed_kernel.jit import count_compiles
from tokenspeed_kernel.triton_run import run_triton
from tokenspeed_reload import Transaction

KERNELS = """
import triton
import triton.language as tl
from swap_helpers import scale

@triton.jit(do_not_specialize=["plain"])
def kernel(x, y, number, plain, rate, FLAG: tl.constexpr, BLOCK: tl.constexpr = 64):
    column = tl.arange(0, BLOCK)
    value = scale(tl.load(x + column * number)) * rate + plain
    if FLAG:
        value += tl.load(y + column)
    tl.store(x + column, value)

@triton.jit
def other(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), 1.0)

@triton.jit
def given(x, F: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), F(tl.load(x)))
"""
HELPERS = """
import triton

@triton.jit
def scale(value):
    return value * 3.0

@triton.jit
def argument(value):
    return value * 5.0
"""
MEMORY = torch.zeros(4096)
X = MEMORY[:1024]
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((X, X, 16, 16, 1.5), {"FLAG": True}),
    ((X, X, 1, 1, 1.0), {"FLAG": True, "num_warps": 8}),
    ((MEMORY[1:], X, 17, 2**40, 1.0), {"FLAG": True}),
    ((X.half(), None, 16, 16, 1.0), {"FLAG": False, "num_stages": 2}),
]
SUCCESS = SimpleNamespace(name="CUDA_SUCCESS")
REFUSED = SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE")


class Cuda:
    """What `cuda.bindings.driver` is asked for. Nodes are numbers; `templates` and `executables` hold what they launch
    as (CUfunction, threads, shared memory)."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=SUCCESS)
    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_KERNEL=1)

    def __init__(self) -> None:
        self.templates: dict[int, tuple[int, int, int]] = {}
        self.executables: dict[int, tuple[int, int, int]] = {}
        self.unloaded: list[int] = []
        self.refuse_after: int | None = None
        for handle in ("CUgraph", "CUgraphExec", "CUgraphNode", "CUfunction", "CUmodule"):
            setattr(self, handle, lambda init_value: init_value)

    def cuGraphGetNodes(self, graph: int, count: int) -> tuple[Any, ...]:
        nodes = [node for node in self.templates if node // 100 == graph]
        return SUCCESS, nodes, len(nodes)

    def cuGraphNodeGetType(self, node: int) -> tuple[Any, ...]:
        return SUCCESS, 1

    def cuGraphKernelNodeGetParams(self, node: int) -> tuple[Any, ...]:
        function, threads, shared = self.templates[node]
        return SUCCESS, SimpleNamespace(func=function, kern=0, blockDimX=threads, sharedMemBytes=shared)

    def cuGraphExecKernelNodeSetParams(self, executable: int, node: int, params: Any) -> tuple[Any, ...]:
        if self.refuse_after is not None:
            self.refuse_after -= 1
            if self.refuse_after < 0:
                self.refuse_after = None
                return (REFUSED,)
        assert executable == 1000 + node // 100
        self.executables[node] = (params.func, params.blockDimX, params.sharedMemBytes)
        return (SUCCESS,)

    def cuGraphKernelNodeSetParams(self, node: int, params: Any) -> tuple[Any, ...]:
        self.templates[node] = (params.func, params.blockDimX, params.sharedMemBytes)
        return (SUCCESS,)

    def cuFuncGetName(self, function: int) -> tuple[Any, ...]:
        return SUCCESS, b"not ours"

    def cuModuleUnload(self, module: int) -> tuple[Any, ...]:
        self.unloaded.append(module)
        return (SUCCESS,)


class Captured:
    """Two graphs, each with every call of `kernel` twice, one of `other`, and one kernel that is not Triton's."""

    def __init__(self, project: Project):
        self.project = project
        self.module = project.load("swap_kernels")
        self.cuda = Cuda()
        self.reader = NodeReader()
        self.reader._driver = self.cuda
        for args, meta in CALLS:
            run_triton(self.module.kernel, (1,), *args, **meta)
        run_triton(self.module.other, (1,), X, BLOCK=64)
        run_triton(self.module.given, (1,), X, F=project.load("swap_helpers").argument, BLOCK=64)
        self.modules = KernelModules(self.reader, ["swap_kernels"])
        loaded = dict(loaded_kernels(["swap_kernels"]))
        self.graphs = [self.graph(number, loaded) for number in (1, 2)]

    def graph(self, number: int, loaded: dict[int, Any]) -> CudaGraph:
        node = 100 * number
        for kernel in loaded.values():
            for _ in range(2 if kernel.source is self.module.kernel else 1):
                self.cuda.templates[node] = (kernel.function, kernel.threads, kernel.shared)
                node += 1
        self.cuda.templates[node] = (9999, 128, 0)
        self.cuda.executables.update(self.cuda.templates)
        raw: Any = SimpleNamespace(raw_cuda_graph=lambda: number, raw_cuda_graph_exec=lambda: 1000 + number)
        return CudaGraph(f"decode {number}", raw, loaded, (), self.reader)

    def edit(self, old: str, new: str) -> Transaction:
        sources = {"swap_kernels": KERNELS, "swap_helpers": HELPERS}
        assert any(old in text for text in sources.values())
        self.project.write(**{name: text.replace(old, new) for name, text in sources.items()})
        return self.project.reloader.reload()

    def prepare(self, transaction: Transaction) -> list[CudaSwap]:
        bodies = transaction.report.bodies
        assert not bodies.beyond
        kernels = [EditedKernel(changed.name, changed.kernel, changed.before) for changed in bodies.kernels]
        return CudaSwapper(self.reader, BodyEdit(bodies.functions, kernels)).prepare(self.graphs)

    def functions(self) -> list[int]:
        """What the executables launch that is a specialisation of `kernel`."""
        others = {9999, *(k.function for k in self.graphs[0].kernels.values() if k.source is not self.module.kernel)}
        return [launch[0] for _, launch in sorted(self.cuda.executables.items()) if launch[0] not in others]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hopper]:
    monkeypatch.setattr(triton_run, "triton", triton)
    with hopper() as device:
        yield device


@pytest.fixture
def captured(device: Hopper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Captured]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    project = Project(tmp_path)
    project.write(swap_helpers=HELPERS, swap_kernels=KERNELS)
    project.watch("swap_helpers", "swap_kernels")
    yield Captured(project)
    project.close()


def test_exactly_what_was_launched_is_compiled_and_later_launches_find_it(captured: Captured, device: Hopper) -> None:
    bodies = captured.edit("+ plain", "- plain").report.bodies
    (changed,) = bodies.kernels
    wanted = list(specialisations_of(EditedKernel(changed.name, changed.kernel, changed.before)))
    assert len(wanted) == len(CALLS)
    with count_compiles() as jit:
        compiled = compile_all(wanted)
    assert jit.compiled == len(CALLS)
    device.launches.clear()
    with count_compiles() as jit:
        for args, meta in CALLS:
            run_triton(captured.module.kernel, (1,), *args, **meta)
    assert jit.compiled == 0
    assert {launch[0] for launch in device.launches} == {kernel.function for kernel in compiled.values()}


@pytest.mark.parametrize(("old", "new"), [("+ plain", "- plain"), ("value * 3.0", "value * 4.0")])
def test_every_node_is_exchanged_taken_back_and_exchanged(captured: Captured, old: str, new: str) -> None:
    before, executables = captured.functions(), dict(captured.cuda.executables)
    transaction = captured.edit(old, new)
    for _ in range(2):
        swaps = captured.prepare(transaction)
        assert [swap.num_nodes for swap in swaps] == [2 * len(CALLS)] * 2
        assert swaps[0].specialisations == swaps[1].specialisations and len(swaps[0].specialisations) == len(CALLS)
        for swap in swaps:
            swap.apply()
        after = captured.functions()
        assert len(after) == len(before) and not set(after) & set(before)
        named = [node for graph in captured.graphs for node in graph.nodes if node.name == "kernel"]
        assert len(named) == len(before) and all(node.specialisation for node in named)
        for swap in reversed(swaps):
            swap.undo()
        assert captured.cuda.executables == executables
    transaction.undo()


def test_three_exchanges_in_a_row_leave_nothing_behind(captured: Captured) -> None:
    first = {kernel.compiled.module for kernel in captured.graphs[0].kernels.values() if kernel.name == "kernel"}
    for sign in ("-", "*", "/"):
        captured.modules.note()
        transaction = captured.edit("+ plain", f"{sign} plain")
        swaps = captured.prepare(transaction)
        for swap in swaps:
            swap.apply()
        for swap in swaps:
            swap.keep()
        transaction.commit()
        del transaction, swaps, swap
        gc.collect()
        captured.modules.unload()
    unloaded = captured.cuda.unloaded
    assert first <= set(unloaded) and len(unloaded) == len(set(unloaded)) == 3 * len(CALLS)
    # Neither template nor executable names what is unloaded, and the side table agrees.
    assert captured.cuda.templates == captured.cuda.executables
    held = set(captured.graphs[0].kernels)
    assert set(captured.functions()) <= held and len(held) == len(CALLS) + 2


def test_an_exchange_that_fails_half_way_is_taken_back(captured: Captured) -> None:
    executables = dict(captured.cuda.executables)
    swaps = captured.prepare(captured.edit("+ plain", "- plain"))
    captured.cuda.refuse_after = 2 * len(CALLS) + 5
    with pytest.raises(CaptureError, match="CUDA_ERROR_INVALID_VALUE"):
        for swap in swaps:
            swap.apply()
    assert captured.cuda.executables != executables
    for swap in reversed(swaps):
        swap.undo()
    assert captured.cuda.executables == executables


def test_shared_memory_and_threads_follow(captured: Captured) -> None:
    swaps = captured.prepare(captured.edit("+ plain", "+ plain + tl.sum(tl.load(x + column), axis=0)"))
    for swap in swaps:
        swap.apply()
    kernels = captured.graphs[0].kernels
    launches = [launch for launch in captured.cuda.executables.values() if launch[0] in set(captured.functions())]
    assert {launch[2] for launch in launches} != {0}
    assert all(launch == (launch[0], kernels[launch[0]].threads, kernels[launch[0]].shared) for launch in launches)


def test_what_does_not_compile_is_captured_anew(captured: Captured) -> None:
    with pytest.raises(CannotSwap, match=r"swap_kernels\.kernel cannot be compiled"):
        captured.prepare(captured.edit("+ plain", "+ undefined_name"))


def test_a_kernel_that_others_are_given_is_captured_anew(captured: Captured) -> None:
    with pytest.raises(CannotSwap, match=r"swap_helpers\.argument is given to given"):
        captured.prepare(captured.edit("value * 5.0", "value * 6.0"))


@pytest.mark.parametrize("name", ["global_scratch_size", "launch_pdl", "cluster_dims", "launch_cooperative_grid"])
def test_another_kind_of_launch_is_captured_anew(captured: Captured, name: str) -> None:
    transaction = captured.edit("+ plain", "- plain")
    for kernel in captured.graphs[0].kernels.values():
        kernel.compiled.metadata = SimpleNamespace(**{**kernel.compiled.metadata._asdict(), name: "another"})
    with pytest.raises(CannotSwap, match=r"swap_kernels\.kernel needs another"):
        captured.prepare(transaction)


def test_without_bindings_and_for_functions_steps_are_captured_anew(captured: Captured) -> None:
    transaction = captured.edit("+ plain", "- plain")
    with pytest.raises(CannotSwap, match="is no kernel"):
        CudaSwapper(captured.reader, BodyEdit([captured.graph])).prepare(captured.graphs)  # type: ignore[list-item]
    captured.reader._driver = None
    with pytest.raises(CannotSwap, match="cuda-bindings is not installed"):
        captured.prepare(transaction)
