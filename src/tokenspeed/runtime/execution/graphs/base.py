"""What a captured step looks like to the rest of the engine, whatever the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tokenspeed.errors import TokenSpeedError

GraphKind = Literal["decode", "prefill"]


class CaptureError(TokenSpeedError):
    """A step does something that a captured graph cannot repeat."""


@dataclass(frozen=True)
class Node:
    """One operation of a graph.

    `name` is the launch name of a kernel or collective, or the overload of an ATen op (`aten.add.Tensor`); on a GPU
    the name of the device function, or what else the node does (`memcpy`). `function` is the live Python function
    behind it, `specialisation` what it was compiled for; None where there is none.
    """

    name: str
    function: Callable[..., Any] | None = None
    specialisation: str | None = None


class Graph(Protocol):
    """A captured step. It reads and writes the very tensors that the step read and wrote."""

    label: str

    @property
    def nodes(self) -> Sequence[Node]:
        """The operations in execution order."""

    @property
    def num_nodes(self) -> int:
        """Number of operations."""

    def replay(self) -> None:
        """Run every operation again on the same tensors, with the code of the capture."""


class GraphBackend(Protocol):
    """Captures the graphs of one generation of the forward code.

    A backend object holds what the graphs of a generation share. Make a new one after the code has changed.
    """

    def session(self) -> AbstractContextManager[None]:
        """The context in which all graphs of the generation are captured."""

    def capture(self, step: Callable[[], None], *, kind: GraphKind, label: str) -> Graph:
        """Run `step` once and keep its operations.

        `step` takes its inputs from tensors that outlive the graph and writes its results into such tensors
        in place. An exception of `step` itself passes through unchanged.

        Raises:
            CaptureError: where the step cannot be repeated.
        """
