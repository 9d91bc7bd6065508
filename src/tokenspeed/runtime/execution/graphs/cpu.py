"""Graphs without a device that has any: a recorded step that is run again, operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from tokenspeed.runtime.execution.graphs.base import BodyEdit, CannotSwap, CaptureError, Graph, GraphKind, Node
from tokenspeed.runtime.execution.graphs.cpu_swap import CpuSwap, CpuSwapper
from tokenspeed.runtime.execution.graphs.launches import LaunchCall, OutsideCode
from tokenspeed.runtime.execution.graphs.program import Program
from tokenspeed.runtime.execution.graphs.recorder import StepRecorder
from tokenspeed.runtime.execution.graphs.snapshot import Snapshotter


class CpuGraph:
    """A captured step. Launch nodes run the code as it was at the capture, whatever was edited since."""

    def __init__(
        self,
        label: str,
        nodes: Sequence[Node],
        program: Program,
        launches: Sequence[LaunchCall] = (),
        outside: OutsideCode | None = None,
    ) -> None:
        self.label = label
        self.nodes = nodes
        self.launches = launches
        self.outside = outside or OutsideCode()
        self._program = program

    @property
    def num_nodes(self) -> int:
        """Number of ATen ops and launches."""
        return len(self.nodes)

    def replay(self) -> None:
        """Run every node again on the same tensors."""
        with torch.inference_mode():
            self._program.run()


class CpuGraphBackend:
    """Captures the graphs of one generation; they share one snapshot of the code.

    `packages` are the prefixes of the modules that are edited in place.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages
        self._snapshots = Snapshotter(packages)
        self._outside = OutsideCode()

    def session(self) -> AbstractContextManager[None]:
        """Nothing has to be prepared."""
        return nullcontext()

    def renew_memory(self) -> None:
        """Graphs of a CPU have no memory of their own."""

    def capture(self, step: Callable[[], None], *, label: str, kind: GraphKind = "decode") -> CpuGraph:
        """Run `step` once, concretely, and keep its operations. Raises CaptureError."""
        recorder = StepRecorder(self._snapshots, self._outside)
        program = recorder.record(step)
        return CpuGraph(label, tuple(recorder.nodes), program, tuple(recorder.launches), self._outside)

    def prepare_swap(self, graphs: Sequence[Graph], edit: BodyEdit) -> list[CpuSwap]:
        """See `GraphBackend`. Raises CannotSwap."""
        recorded = [graph for graph in graphs if isinstance(graph, CpuGraph)]
        swapper = CpuSwapper(self._packages, edit)
        try:
            swapper.check({id(graph.outside): graph.outside for graph in recorded}.values())
            swaps = [swapper.swap(graph.launches) for graph in recorded]
        except CaptureError as error:
            raise CannotSwap(str(error)) from error
        swapper.check_found()
        return swaps
