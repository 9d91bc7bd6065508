"""The captured steps of one state of the code."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from tokenspeed.runtime.execution.graphs.base import Graph


class Generation:
    """Graphs captured from the same code. `number` rises at every commit and is never used again."""

    def __init__(self, number: int, decode: Mapping[int, Graph], prefill: Mapping[int, Graph]):
        self.number = number
        self.decode = dict(sorted(decode.items()))
        self.prefill = dict(sorted(prefill.items()))

    @property
    def num_nodes(self) -> int:
        """Nodes of all graphs together."""
        return sum(graph.num_nodes for graph in (*self.decode.values(), *self.prefill.values()))

    def read_nodes(self) -> None:
        """Read now what each graph is made of, which the first exchange of kernels would have to wait for."""
        for graph in (*self.decode.values(), *self.prefill.values()):
            _ = graph.nodes

    def decode_graph(self, rows: int) -> tuple[int, Graph] | None:
        """The smallest decode graph that takes `rows` sequences, with its size."""
        return _at_least(self.decode, rows)

    def prefill_graph(self, tokens: int) -> tuple[int, Graph] | None:
        """The smallest prefill graph that takes `tokens` tokens, with its bucket."""
        return _at_least(self.prefill, tokens)


def _at_least(graphs: dict[int, Graph], size: int) -> tuple[int, Graph] | None:
    sizes = list(graphs)
    index = bisect_left(sizes, size)
    return (sizes[index], graphs[sizes[index]]) if index < len(sizes) else None
