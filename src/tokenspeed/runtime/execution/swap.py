"""New code in the captured steps that serve: put in place, proven, and kept or taken back as a whole.

Whatever the device is, its backend says what can be exchanged (`GraphBackend.prepare_swap`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tokenspeed.errors import TokenSpeedError
from tokenspeed.runtime.execution.executor import Executor
from tokenspeed.runtime.execution.generation import Generation
from tokenspeed.runtime.execution.graphs.base import BodyEdit, CannotSwap, Graph, GraphKind, GraphSwap
from tokenspeed_kernel.progress import PROGRESS


class SwapFailed(TokenSpeedError):
    """A captured step with new code in it does not do what the new code does by itself."""


class KernelSwap:
    """What an edit of kernel bodies makes of all graphs of the generation that serves."""

    def __init__(self, executor: Executor, graphs: Sequence[tuple[GraphKind, int, Graph]], swaps: Sequence[GraphSwap]):
        self.executor = executor
        self._graphs = graphs
        self._swaps = swaps

    @property
    def num_nodes(self) -> int:
        """Nodes of all graphs that get new code."""
        return sum(swap.num_nodes for swap in self._swaps)

    def apply(self, number: int) -> Generation:
        """Put the new code into all graphs, and prove it. Where this raises, `undo` takes back what was done.

        Args:
            number: of the generation that the graphs are of from now on.

        Raises:
            CannotSwap: the steps have to be captured anew, since nothing is wrong and it cannot be proven.
            SwapFailed: a graph computes something else than the edited code.
        """
        for swap in self._swaps:
            swap.apply()
        for kind, size, graph in self._to_prove():
            PROGRESS.step(f"proof {graph.label}")
            self._prove(kind, size, graph)
        before = self.executor.generation
        return Generation(number, before.decode, before.prefill)

    def undo(self) -> None:
        """Put the old code back everywhere."""
        self.executor.synchronize()
        for swap in reversed(self._swaps):
            swap.undo()

    def keep(self) -> None:
        """Let go of the old code."""
        for swap in self._swaps:
            swap.keep()

    def _to_prove(self) -> Iterator[tuple[GraphKind, int, Graph]]:
        """The smallest graph for each distinct set of new specialisations, of decode and of prefill."""
        seen: set[tuple[GraphKind, frozenset[tuple[str, str]]]] = set()
        for (kind, size, graph), swap in zip(self._graphs, self._swaps, strict=True):
            if swap.num_nodes and (kind, swap.specialisations) not in seen:
                seen.add((kind, swap.specialisations))
                yield kind, size, graph

    def _prove(self, kind: GraphKind, size: int, graph: Graph) -> None:
        """Compare what a replay and the edited code compute from the same inputs, bit for bit."""
        if not self.executor.has_own_slots(kind, size):
            raise CannotSwap(f"there is too little scratch memory to prove {graph.label}")
        first = self.executor.computed(kind, size)
        if same_bits(self.executor.computed(kind, size, graph), first):
            return
        if not same_bits(self.executor.computed(kind, size), first):
            raise CannotSwap(f"the edited code computes something else each time, so that {graph.label} has no proof")
        raise SwapFailed(
            f"{graph.label} with the edited kernels in it computes something else than the edited code does when it "
            "runs by itself; look for what depends on more than the arguments of the kernel"
        )


def same_bits(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Whether tensors of equal shapes and types agree in every bit, those of NaN included."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(left, right, strict=True))


def prepare_swap(executor: Executor, edit: BodyEdit) -> KernelSwap:
    """Make the new code for every graph that serves; nothing is changed yet.

    Raises:
        CannotSwap: the graphs have to be captured anew.
    """
    generation = executor.generation
    graphs: list[tuple[GraphKind, int, Graph]] = [("decode", size, graph) for size, graph in generation.decode.items()]
    graphs += [("prefill", size, graph) for size, graph in generation.prefill.items()]
    swaps = executor.make_backend().prepare_swap([graph for _, _, graph in graphs], edit)
    return KernelSwap(executor, graphs, swaps)
