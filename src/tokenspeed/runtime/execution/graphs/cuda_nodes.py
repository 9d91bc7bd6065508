"""The nodes of a captured CUDA graph, read and written through cuda-bindings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenspeed.runtime.execution.graphs.base import CaptureError
from tokenspeed.runtime.execution.graphs.triton_kernels import LoadedKernel


@dataclass(frozen=True)
class RawNode:
    """One node: its handle, what it does, and the CUfunction or CUkernel of a kernel launch."""

    handle: int
    kind: str
    function: int | None = None


class NodeReader:
    """Lists the nodes of graphs, given as cudaGraph_t, and exchanges their kernels; without cuda-bindings every list
    is empty."""

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

    @property
    def is_open(self) -> bool:
        """Whether nodes can be read."""
        return self._driver is not None

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

    def write(self, executable: int, node: int, kernel: LoadedKernel) -> None:
        """Let the executable of a graph launch `kernel` in a node, with arguments and grid of the template's node.

        Args:
            executable: a cudaGraphExec_t.
            node: of its template.
            kernel: takes the parameters that the node has.

        Raises:
            CaptureError: the driver refuses; the node is as it was.
        """
        handle, params = self._params(node, kernel)
        driver = self._driver
        self._call(driver.cuGraphExecKernelNodeSetParams(driver.CUgraphExec(init_value=executable), handle, params))

    def write_template(self, node: int, kernel: LoadedKernel) -> None:
        """The same for the node of the template itself."""
        self._call(self._driver.cuGraphKernelNodeSetParams(*self._params(node, kernel)))

    def parameters(self, function: int) -> list[tuple[int, int]]:
        """Offset and size of each parameter of a kernel; nothing where the driver does not tell."""
        driver, found = self._driver, list[tuple[int, int]]()
        ask = getattr(driver, "cuFuncGetParamInfo", None)
        while ask is not None:
            answer = ask(driver.CUfunction(init_value=function), len(found))
            if answer[0] != driver.CUresult.CUDA_SUCCESS:
                break
            found.append((int(answer[1]), int(answer[2])))
        return found

    def unload(self, module: int) -> None:
        """Unload a CUmodule that nothing uses any more."""
        self._call(self._driver.cuModuleUnload(self._driver.CUmodule(init_value=module)))

    def _params(self, node: int, kernel: LoadedKernel) -> tuple[Any, Any]:
        driver = self._driver
        handle = driver.CUgraphNode(init_value=node)
        params = self._call(driver.cuGraphKernelNodeGetParams(handle))[0]
        params.func = driver.CUfunction(init_value=kernel.function)
        params.blockDimX = kernel.threads
        params.sharedMemBytes = kernel.shared
        return handle, params

    def _call(self, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        if answer[0] != self._driver.CUresult.CUDA_SUCCESS:
            raise CaptureError(
                f"the driver refuses what concerns a graph ({answer[0].name}); start with --enforce-eager"
            )
        return answer[1:]
