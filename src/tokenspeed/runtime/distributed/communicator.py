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
        rows = tensor.shape[0]
        parts = tensor.new_empty(self.size * rows, *tensor.shape[1:])
        _gather_into(parts, tensor.contiguous(), self.process_group)
        return parts.unflatten(0, (self.size, rows)).movedim(0, -2).flatten(-2)


def _gather_into(out: torch.Tensor, part: torch.Tensor, process_group: ProcessGroup) -> None:
    """Fill `out`, [ranks * rows, ...], with every rank's `part`, [rows, ...], in rank order."""
    # torch 2.13 renamed it and warns of the old name.
    gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    gather(out, part, group=process_group)
