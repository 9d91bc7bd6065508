"""CUDA graphs: one whole step a graph, captured on a stream and into a memory pool that all generations share."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property

import torch

from tokenspeed.runtime.execution.graphs.base import BodyEdit, CannotSwap, CaptureError, Graph, GraphKind, Node
from tokenspeed.runtime.execution.graphs.cuda_nodes import NodeReader, RawNode
from tokenspeed.runtime.execution.graphs.cuda_swap import CudaSwap, CudaSwapper
from tokenspeed.runtime.execution.graphs.triton_kernels import LoadedKernel, loaded_kernels
from tokenspeed_kernel.jit import noted

CAPTURE_MODE = "relaxed"
"""A kernel that is compiled or loaded for the first time inside a capture allocates memory, which this permits."""


class GraphMemory:
    """Memory pool and capture stream of the graphs of one kind.

    They outlive every generation: the blocks of a pool are used again on the stream that allocated them only, so
    that a generation with a stream of its own would keep its memory for ever.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._unfinished: list[torch.cuda.CUDAGraph] = []

    def open(self) -> None:
        """Make the stream, with cuBLAS's handle and workspace outside of the pool, and the pool."""
        with warnings.catch_warnings():
            # torch says once that the mode of `_no_reading_on_the_host` does not know every read; CUDA knows the rest.
            warnings.simplefilter("ignore")
            with _no_reading_on_the_host():
                self.stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self.stream):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                square = torch.zeros(16, 16, dtype=dtype, device=self.device)
                torch.addmm(square[0], square, square)
                torch.mm(square, square)
        self.stream.synchronize()
        self._number = torch.zeros(1, device=self.device)  # made now: a pool may be needed when there is no room for it
        self._open_pool()

    def give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Take a new pool: `graph` was invalidated in its capture, and torch cannot end that in the pool it had."""
        # Its destructor would touch what the capture left behind.
        self._unfinished.append(graph)
        # The capture may have ended as far as the pool knows. The other is the share that the graph would give up.
        for give_back in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with suppress(RuntimeError):
                give_back(self.stream.device_index, self.pool)
        self.renew()

    def renew(self) -> None:
        """Take a new pool; the one before goes with the graphs that were captured in it."""
        self._open_pool()

    def _open_pool(self) -> None:
        """Make the pool. A graph of its own keeps it: torch does not take a pool again that had lost its last graph."""
        self.pool = torch.cuda.graph_pool_handle()
        self._anchor = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self.stream):
            self._anchor.capture_begin(pool=self.pool, capture_error_mode=CAPTURE_MODE)
            self._number.add_(1)
            self._anchor.capture_end()


class CudaGraph:
    """A captured step, ready to be replayed on the current stream.

    `kernels` are the Triton kernels that were loaded when the generation was captured, by CUfunction. It holds them:
    what a graph launches must not be unloaded. `others` are what other compilers made, held likewise. The nodes are
    read when somebody asks for them. `moved` are those that launch another function than they were captured with.
    """

    def __init__(
        self,
        label: str,
        graph: torch.cuda.CUDAGraph,
        kernels: dict[int, LoadedKernel],
        others: Sequence[object],
        reader: NodeReader,
    ):
        self.label = label
        self.graph = graph
        self.kernels = kernels
        self.others = others
        self.moved: dict[int, int] = {}
        self._reader = reader

    @property
    def num_nodes(self) -> int:
        """Number of nodes: kernels, copies and fills."""
        return self._reader.count(self.graph.raw_cuda_graph())

    @property
    def executable(self) -> int:
        """The cudaGraphExec_t that `replay` launches."""
        return self.graph.raw_cuda_graph_exec()

    @property
    def nodes(self) -> Sequence[Node]:
        """What each node does, in the order of the capture."""
        return [self._describe(node) for node in self.raw_nodes]

    @cached_property
    def raw_nodes(self) -> Sequence[RawNode]:
        """The nodes of the template that `raw_cuda_graph` names, in the order and with the kernels of the capture."""
        return list(self._reader.read(self.graph.raw_cuda_graph()))

    def launches(self) -> dict[int, list[int]]:
        """The nodes that launch each function now."""
        found: dict[int, list[int]] = {}
        for node in self.raw_nodes:
            if node.function is not None:
                found.setdefault(self.moved.get(node.handle, node.function), []).append(node.handle)
        return found

    def hold(self, kernel: LoadedKernel) -> None:
        """Keep a kernel that a node is to launch. The graphs of a generation share what they hold."""
        self.kernels[kernel.function] = kernel

    def release(self, kernel: LoadedKernel) -> None:
        """Let go of a kernel that no node launches any more."""
        self.kernels.pop(kernel.function, None)

    def replay(self) -> None:
        """Launch the step; returns before it is computed."""
        self.graph.replay()

    def _describe(self, node: RawNode) -> Node:
        if node.function is None:
            return Node(node.kind)
        function = self.moved.get(node.handle, node.function)
        kernel = self.kernels.get(function)
        if kernel is None:
            return Node(self._reader.name(function))
        return Node(kernel.name, kernel.source.fn, kernel.specialisation)


class CudaGraphBackend:
    """Captures the graphs of one generation into the memory that all generations share.

    `packages` are the prefixes of the modules in which Triton kernels are defined.
    """

    def __init__(self, memory: Mapping[GraphKind, GraphMemory], packages: Sequence[str], reader: NodeReader):
        self._memory = memory
        self._packages = packages
        self._reader = reader
        self._kernels: dict[int, LoadedKernel] = {}
        self._others: list[object] = []

    @contextmanager
    def session(self) -> Iterator[None]:
        """Let no garbage be collected meanwhile: a kernel that is unloaded while a stream captures ends the capture."""
        torch.cuda.synchronize()
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
            self._kernels.update(loaded_kernels(self._packages))
            self._others.extend(noted())
        finally:
            if was_enabled:
                gc.enable()

    def renew_memory(self) -> None:
        """See `GraphBackend`."""
        for memory in self._memory.values():
            memory.renew()

    def capture(self, step: Callable[[], None], *, kind: GraphKind, label: str) -> CudaGraph:
        """Run `step` once on the capture stream, which computes nothing, and keep its launches. Raises CaptureError."""
        memory = self._memory[kind]
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        memory.stream.wait_stream(torch.cuda.current_stream(memory.device))
        with torch.inference_mode(), torch.cuda.stream(memory.stream):
            self._record(graph, step, memory, label)
        graph.instantiate()
        return CudaGraph(label, graph, self._kernels, self._others, self._reader)

    def prepare_swap(self, graphs: Sequence[Graph], edit: BodyEdit) -> list[CudaSwap]:
        """See `GraphBackend`. Raises CannotSwap."""
        try:
            return CudaSwapper(self._reader, edit).prepare([graph for graph in graphs if isinstance(graph, CudaGraph)])
        except CaptureError as error:
            raise CannotSwap(str(error)) from error

    def _record(self, graph: torch.cuda.CUDAGraph, step: Callable[[], None], memory: GraphMemory, label: str) -> None:
        graph.capture_begin(pool=memory.pool, capture_error_mode=CAPTURE_MODE)
        try:
            with _no_reading_on_the_host():
                step()
        except BaseException:
            with suppress(CaptureError):
                self._end(graph, memory, label)
            raise
        self._end(graph, memory, label)

    def _end(self, graph: torch.cuda.CUDAGraph, memory: GraphMemory, label: str) -> None:
        try:
            graph.capture_end()
        except RuntimeError as error:
            memory.give_up(graph)
            raise CaptureError(f"the step {label} cannot be captured ({_first_line(error)})") from error


def open_graph_memory(device: torch.device) -> dict[GraphKind, GraphMemory]:
    """Memory for the graphs of each kind."""
    memory: dict[GraphKind, GraphMemory] = {"decode": GraphMemory(device), "prefill": GraphMemory(device)}
    for part in memory.values():
        part.open()
    return memory


@contextmanager
def _no_reading_on_the_host() -> Iterator[None]:
    """Let torch refuse what waits for the device, before CUDA does: its refusal would spoil the capture as a whole."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
