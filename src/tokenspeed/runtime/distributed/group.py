"""The ranks that share a layer, as the layer sees them."""

from __future__ import annotations

import torch

from tokenspeed.runtime.distributed.communicator import Communicator
from tokenspeed_kernel.launch import launch


class Group:
    """A named set of ranks. Layers keep the group; the communicator behind it may be exchanged.

    With one rank every collective is the identity and nothing is launched.
    """

    def __init__(self, name: str, rank: int, size: int, communicator: Communicator | None = None):
        self.name = name
        self.rank = rank
        self.size = size
        self.communicator = communicator

    @classmethod
    def solo(cls) -> Group:
        """The group of a model that lives on one rank."""
        return cls("solo", 0, 1)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the ranks in place and return it; any shape."""
        if self.size == 1:
            return tensor
        reduced: torch.Tensor = launch("all_reduce", Communicator.all_reduce, self._communicator(), tensor)
        return reduced

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate [..., n] of every rank to [..., n * size], in rank order."""
        if self.size == 1:
            return tensor
        gathered: torch.Tensor = launch("all_gather", Communicator.all_gather_last, self._communicator(), tensor)
        return gathered

    def _communicator(self) -> Communicator:
        if self.communicator is None:
            raise RuntimeError(f"group {self.name} has {self.size} ranks and no communicator")
        return self.communicator
