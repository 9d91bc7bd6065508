"""One way for the ranks of a group to exchange tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def wait_for_ever() -> None:
    """Look at nothing while a collective waits: the end of the process is what frees it."""


class Communicator(ABC):
    """The collectives of one set of connections.

    A captured graph holds the communicator that it was captured with; a `Group` may be given another one. After an
    error the communicator can only be closed.
    """

    def __init__(self) -> None:
        self.attend: Callable[[], None] = wait_for_ever

    @contextmanager
    def guarded(self, attend: Callable[[], None]) -> Iterator[None]:
        """Have `attend` called while a collective of the block waits for other ranks.

        Whatever it raises gives the collective up.
        """
        self.attend = attend
        try:
            yield
        finally:
            self.attend = wait_for_ever

    @abstractmethod
    def open(self) -> None:
        """Connect to the other ranks, which do the same now.

        Raises:
            RuntimeError: when one does not come, or the connection cannot be made.
        """

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the ranks, in place, and return it; every rank gets the same bits.

        Raises:
            CollectiveBroken: when another rank has left.
        """

    @abstractmethod
    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate [..., n] of every rank to [..., n * size], in rank order. Raises as `all_reduce` does."""

    @abstractmethod
    def close(self) -> None:
        """Break the connections, which frees a peer that waits in a collective. Every graph that holds this
        communicator has to be gone."""
