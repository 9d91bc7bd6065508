"""The collectives of ranks on GPUs, over NCCL.

They are launched on the current stream, so that a stream that captures takes them into its graph; the host waits for
nothing. A graph holds the communicator that it was captured with: it has to be gone before that is closed, since
`abort` waits for it.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

from tokenspeed.runtime.distributed.communicator import Communicator
from tokenspeed.runtime.distributed.errors import CollectiveBroken
from tokenspeed_kernel.progress import PROGRESS

WATCHDOG_TIMEOUT = timedelta(days=1)
"""After which torch's own watchdog would end the process: who stands still is found by other means."""

CLOSING_TIMEOUT_S = 8.0
"""Seconds that an abort may take; it frees the device from a collective whose peer does not come within one."""


class NcclCommunicator(Communicator):
    """One communicator of NCCL. `store` is a namespace of its own, where the ranks meet."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device):
        super().__init__()
        self.store = store
        self.rank = rank
        self.size = size
        self.device = device
        # A torch without CUDA does not have the class.
        self._nccl: Any = None

    def open(self) -> None:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = WATCHDOG_TIMEOUT
        self._nccl = ProcessGroupNCCL(self.store, self.rank, self.size, options)
        self._nccl.eager_connect_single_device(self.device)
        # What NCCL allocates at the first collectives is there before memory is measured and steps are captured.
        self.all_gather_last(self.all_reduce(torch.zeros(1, self.size, device=self.device)))
        torch.cuda.synchronize(self.device)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        options = AllreduceOptions()
        options.asyncOp = False
        self._launch("all_reduce", self._opened().allreduce([tensor], options))
        return tensor

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.shape[0]
        parts = tensor.new_empty(self.size * rows, *tensor.shape[1:])
        options = AllgatherOptions()
        options.asyncOp = False
        self._launch("all_gather", self._opened()._allgather_base(parts, tensor.contiguous(), options))
        return parts.unflatten(0, (self.size, rows)).movedim(0, -2).flatten(-2)

    def close(self) -> None:
        if self._nccl is None:
            return
        nccl, self._nccl = self._nccl, None
        closing = threading.Thread(target=nccl.abort, name="close nccl", daemon=True)
        closing.start()
        closing.join(CLOSING_TIMEOUT_S)

    def _launch(self, what: str, work: Any) -> None:
        PROGRESS.launch(what)
        if work is not None:
            work.wait()  # has the current stream wait, not the host

    def _opened(self) -> Any:
        if self._nccl is None:
            raise CollectiveBroken("the communicator is closed")
        return self._nccl
