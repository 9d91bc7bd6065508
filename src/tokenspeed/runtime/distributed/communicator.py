"""One way for the ranks of a group to exchange tensors, over torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Communicator:
    """The collectives of one process group.

    A captured graph holds the communicator that it was captured with; a `Group` may be given another one.
    """

    def __init__(self, process_group: ProcessGroup, size: int):
        self.process_group = process_group
        self.size = size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the ranks, in place; every rank gets the same bits."""
        torch.distributed.all_reduce(tensor, group=self.process_group)
        return tensor

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate [..., n] of every rank to [..., n * size], in rank order."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        torch.distributed.all_gather(parts, tensor.contiguous(), group=self.process_group)
        return torch.cat(parts, dim=-1)
