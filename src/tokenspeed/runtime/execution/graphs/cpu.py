"""Graphs without a device that has any: a recorded step that is run again, operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from tokenspeed.runtime.execution.graphs.base import GraphKind, Node
from tokenspeed.runtime.execution.graphs.program import Program
from tokenspeed.runtime.execution.graphs.recorder import StepRecorder
from tokenspeed.runtime.execution.graphs.snapshot import Snapshotter


class CpuGraph:
    """A captured step. Launch nodes run the code as it was at the capture, whatever was edited since."""

    def __init__(self, label: str, nodes: Sequence[Node], program: Program) -> None:
        self.label = label
        self.nodes = nodes
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
        self._snapshots = Snapshotter(packages)

    def session(self) -> AbstractContextManager[None]:
        """Nothing has to be prepared."""
        return nullcontext()

    def capture(self, step: Callable[[], None], *, label: str, kind: GraphKind = "decode") -> CpuGraph:
        """Run `step` once, concretely, and keep its operations. Raises CaptureError."""
        recorder = StepRecorder(self._snapshots)
        program = recorder.record(step)
        return CpuGraph(label, tuple(recorder.nodes), program)
