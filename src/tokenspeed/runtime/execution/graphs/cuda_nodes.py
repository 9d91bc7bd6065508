"""The nodes of a captured CUDA graph, read through cuda-bindings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenspeed.runtime.execution.graphs.base import CaptureError, Node
from tokenspeed.runtime.execution.graphs.triton_kernels import LoadedKernel


@dataclass(frozen=True)
class KernelNode:
    """A kernel launch in a graph: which node, and the CUfunction (0 where a library hides it)."""

    node: int
    function: int


class NodeReader:
    """Lists the nodes of graphs; without cuda-bindings every list is empty."""

    def __init__(self) -> None:
        self._driver: Any = None
        self._names: dict[int, str] = {}

    def open(self) -> bool:
        """Load cuda-bindings; False where they are not installed."""
        try:
            from cuda.bindings import driver
        except ImportError:
            return False
        self._driver = driver
        return True

    def read(
        self, graph: int, kernel_of: Callable[[int], LoadedKernel | None]
    ) -> tuple[tuple[Node, ...], tuple[KernelNode, ...]]:
        """All nodes in the order of their capture, and which of them launch kernels.

        Args:
            graph: a cudaGraph_t.
            kernel_of: gives Triton's kernel for a CUfunction.
        """
        nodes: list[Node] = []
        launches: list[KernelNode] = []
        for handle, kind, function in self._walk(graph):
            if kind != "kernel":
                nodes.append(Node(kind))
                continue
            launches.append(KernelNode(handle, function))
            kernel = kernel_of(function)
            if kernel is None:
                nodes.append(Node(self._name(function)))
            else:
                nodes.append(Node(kernel.name, kernel.source.fn, kernel.specialisation))
        return tuple(nodes), tuple(launches)

    def _walk(self, graph: int) -> Iterator[tuple[int, str, int]]:
        driver = self._driver
        if driver is None:
            return
        raw = driver.CUgraph(init_value=graph)
        count = self._call(driver.cuGraphGetNodes(raw, 0))[1]
        kernel = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        for node in self._call(driver.cuGraphGetNodes(raw, count))[0]:
            kind = self._call(driver.cuGraphNodeGetType(node))[0]
            if kind == kernel:
                params = self._call(driver.cuGraphKernelNodeGetParams(node))[0]
                yield int(node), "kernel", int(params.func) or int(params.kern)
            else:
                yield int(node), kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower(), 0

    def _name(self, function: int) -> str:
        name = self._names.get(function)
        if name is None:
            driver = self._driver
            found = driver.cuFuncGetName(driver.CUfunction(init_value=function))
            if found[0] != driver.CUresult.CUDA_SUCCESS:
                found = driver.cuKernelGetName(driver.CUkernel(init_value=function))
            failed = found[0] != driver.CUresult.CUDA_SUCCESS
            name = self._names[function] = "kernel" if failed else found[1].decode()
        return name

    def _call(self, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        if answer[0] != self._driver.CUresult.CUDA_SUCCESS:
            raise CaptureError(f"the nodes of a graph cannot be read ({answer[0].name}); start with --enforce-eager")
        return answer[1:]
