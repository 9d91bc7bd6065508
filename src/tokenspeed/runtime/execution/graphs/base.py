"""What a captured step looks like to the rest of the engine, whatever the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FunctionType
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


class CannotSwap(Exception):
    """The code in captured steps cannot be exchanged for what an edit made of it: why, as a clause."""


@dataclass(frozen=True)
class EditedKernel:
    """A kernel that compiles anew: its dotted name, the live object, and its attributes before the edit."""

    name: str
    kernel: Any
    before: Mapping[str, Any]


@dataclass(frozen=True)
class BodyEdit:
    """An edit that changed the bodies of these functions and kernels, and nothing else whatsoever."""

    functions: Sequence[FunctionType] = ()
    kernels: Sequence[EditedKernel] = ()


class GraphSwap(Protocol):
    """New code for nodes of one captured step, to be put into its executable in the place of the old.

    `num_nodes` are concerned. `specialisations` says what of which kernel the new code is for: two steps with the
    same ones are proven by a replay of either.
    """

    num_nodes: int
    specialisations: frozenset[tuple[str, str]]

    def apply(self) -> None:
        """Put the new code in place. Where that fails half way, `undo` takes back what was done."""

    def undo(self) -> None:
        """Put the old code back, exactly; nothing where it is in place."""

    def keep(self) -> None:
        """Let go of the old code: it is not to come back."""


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

    def renew_memory(self) -> None:
        """Let the captures to come share no memory with those before, whose memory goes with the last of them."""

    def capture(self, step: Callable[[], None], *, kind: GraphKind, label: str) -> Graph:
        """Run `step` once and keep its operations.

        `step` takes its inputs from tensors that outlive the graph and writes its results into such tensors
        in place. An exception of `step` itself passes through unchanged.

        Raises:
            CaptureError: where the step cannot be repeated.
        """

    def prepare_swap(self, graphs: Sequence[Graph], edit: BodyEdit) -> Sequence[GraphSwap]:
        """Make the new code for the nodes of `graphs` that run what was edited, in their order; nothing is changed yet.

        Compiles on the way what these nodes need, and nothing else.

        Raises:
            CannotSwap: the steps have to be captured anew.
        """
