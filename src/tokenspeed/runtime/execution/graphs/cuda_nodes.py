"""The nodes of a captured CUDA graph, read through cuda-bindings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenspeed.runtime.execution.graphs.base import CaptureError


@dataclass(frozen=True)
class RawNode:
    """One node: its handle, what it does, and the CUfunction or CUkernel of a kernel launch."""

    handle: int
    kind: str
    function: int | None = None


class NodeReader:
    """Lists the nodes of graphs, given as cudaGraph_t; without cuda-bindings every list is empty."""

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

    def count(self, graph: int) -> int:
        """Number of nodes."""
        if self._driver is None:
            return 0
        count: int = self._call(self._driver.cuGraphGetNodes(self._driver.CUgraph(init_value=graph), 0))[1]
        return count

    def read(self, graph: int) -> Iterator[RawNode]:
        """All nodes, in the order in which they were captured."""
        driver = self._driver
        if driver is None:
            return
        kernel = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        nodes = self._call(driver.cuGraphGetNodes(driver.CUgraph(init_value=graph), self.count(graph)))[0]
        for node in nodes:
            kind = self._call(driver.cuGraphNodeGetType(node))[0]
            if kind == kernel:
                params = self._call(driver.cuGraphKernelNodeGetParams(node))[0]
                yield RawNode(int(node), "kernel", int(params.func) or int(params.kern))
            else:
                yield RawNode(int(node), kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower())

    def name(self, function: int) -> str:
        """Name of the device function behind a CUfunction or CUkernel."""
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
