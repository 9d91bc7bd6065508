"""Exchanges kernels in the executables of captured CUDA graphs.

The executable of a graph is written node by node (`cuGraphExecKernelNodeSetParams`); its template keeps the kernels
of before until the exchange is final, and the inverse exchange is exact. A second executable of each graph would leave
the first one untouched as well, but to make one takes several times as long as to write the nodes, and as much memory
as the graph itself.

Arguments stay what they were: the same specialisation of a kernel takes the same parameters. What else belongs to a
launch is compared before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tokenspeed.runtime.execution.graphs.base import BodyEdit, CannotSwap, CaptureError
from tokenspeed.runtime.execution.graphs.cuda_nodes import NodeReader
from tokenspeed.runtime.execution.graphs.triton_compile import Specialisation, compile_all, specialisations_of
from tokenspeed.runtime.execution.graphs.triton_kernels import LoadedKernel

if TYPE_CHECKING:
    from tokenspeed.runtime.execution.graphs.cuda import CudaGraph

_OF_A_LAUNCH = {
    "num_ctas": "cluster",
    "cluster_dims": "cluster",
    "launch_cooperative_grid": "cooperative launch",
    "launch_pdl": "programmatic dependent launch",
    "global_scratch_size": "scratch memory",
    "global_scratch_align": "scratch memory",
    "profile_scratch_size": "scratch memory for profiles",
    "profile_scratch_align": "scratch memory for profiles",
    "tensordesc_meta": "tensor descriptors",
}
"""What a node keeps beside function, block and shared memory, by the name that Triton has for it."""


class CudaSwap:
    """New kernels for nodes of one graph: for each new kernel the one before it, and the nodes."""

    def __init__(
        self,
        graph: CudaGraph,
        reader: NodeReader,
        changes: Sequence[tuple[LoadedKernel, LoadedKernel, Sequence[int]]],
    ) -> None:
        self.graph = graph
        self.num_nodes = sum(len(nodes) for _, _, nodes in changes)
        self.specialisations = frozenset((new.name, new.specialisation) for _, new, _ in changes)
        self._reader = reader
        self._changes = changes
        self._written: list[tuple[int, LoadedKernel]] = []

    def apply(self) -> None:
        executable = self.graph.executable
        for old, new, nodes in self._changes:
            self.graph.hold(new)
            for node in nodes:
                self._reader.write(executable, node, new)
                self._written.append((node, old))
                self.graph.moved[node] = new.function

    def undo(self) -> None:
        while self._written:
            node, old = self._written[-1]
            self._reader.write(self.graph.executable, node, old)
            self.graph.moved[node] = old.function
            self._written.pop()
        for _, new, _ in self._changes:
            self.graph.release(new)

    def keep(self) -> None:
        """Let the template follow, so that nothing names a kernel that is unloaded; else the old kernel is held on."""
        self._written.clear()
        with suppress(CaptureError):
            for old, new, nodes in self._changes:
                for node in nodes:
                    self._reader.write_template(node, new)
                self.graph.release(old)


class CudaSwapper:
    """Finds the nodes that launch edited kernels, and compiles what these launch."""

    def __init__(self, reader: NodeReader, edit: BodyEdit) -> None:
        self._reader = reader
        self._edit = edit
        self._sources = {id(edited.kernel) for edited in edit.kernels}

    def prepare(self, graphs: Sequence[CudaGraph]) -> list[CudaSwap]:
        """See `GraphBackend.prepare_swap`. Raises CannotSwap."""
        if self._edit.functions:
            function = self._edit.functions[0]
            raise CannotSwap(f"{function.__module__}.{function.__qualname__} is no kernel of Triton")
        if not self._reader.is_open:
            raise CannotSwap("cuda-bindings is not installed; install tokenspeed[gpu]")
        self._check_given(graphs)
        before = {
            specialisation.function: specialisation
            for edited in self._edit.kernels
            for specialisation in specialisations_of(edited)
        }
        nodes = [self._nodes(graph, before) for graph in graphs]
        wanted = {function: before[function] for held in nodes for function in held}
        compiled = compile_all(list(wanted.values()))
        pairs = {
            function: self._pair(specialisation, compiled[specialisation])
            for function, specialisation in wanted.items()
        }
        return [
            CudaSwap(graph, self._reader, [(*pairs[function], handles) for function, handles in held.items()])
            for graph, held in zip(graphs, nodes, strict=True)
        ]

    def _check_given(self, graphs: Sequence[CudaGraph]) -> None:
        """Refuse kernels that are given an edited one as a constant: their own code has not changed, what they run has.

        Triton writes the hash of such a constant into the key of a specialisation.
        """
        hashes = {edited.before.get("hash"): edited.name for edited in self._edit.kernels if edited.before.get("hash")}
        for kernel in {key: k for graph in graphs for key, k in graph.kernels.items()}.values():
            for text, name in hashes.items():
                if str(text) in kernel.specialisation:
                    raise CannotSwap(f"{name} is given to {kernel.name} as an argument")

    def _nodes(self, graph: CudaGraph, before: Mapping[int, Specialisation]) -> dict[int, list[int]]:
        """The nodes of a graph that launch superseded kernels, by these."""
        found = {}
        for function, nodes in graph.launches().items():
            if function in before:
                found[function] = nodes
            elif function in graph.kernels and id(graph.kernels[function].source) in self._sources:
                raise CannotSwap(f"{graph.kernels[function].name} is in {graph.label} as it was before earlier edits")
        return found

    def _pair(self, before: Specialisation, compiled: Any) -> tuple[LoadedKernel, LoadedKernel]:
        old = before.loaded(before.compiled)
        new = before.loaded(compiled)
        for name, what in _OF_A_LAUNCH.items():
            if getattr(old.compiled.metadata, name, None) != getattr(new.compiled.metadata, name, None):
                raise CannotSwap(f"{before.name} needs another {what} than it was captured with")
        if self._reader.parameters(old.function) != self._reader.parameters(new.function):
            raise CannotSwap(f"{before.name} takes other parameters than it was captured with")
        return old, new
