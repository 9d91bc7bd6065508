"""The collectives of ranks on GPUs, over NCCL.

They are launched on the current stream, so that a stream that captures takes them into its graph; the host waits for
nothing. A graph holds the communicator that it was captured with: it has to be gone before that is closed, since
`abort` waits for it.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

from tokenspeed.runtime.distributed.communicator import Communicator
from tokenspeed.runtime.distributed.errors import CollectiveBroken, RankLost
from tokenspeed_kernel.progress import PROGRESS

WATCHDOG_TIMEOUT = timedelta(days=1)
"""After which torch's own watchdog would end the process: who stands still is found by other means."""

CLOSING_TIMEOUT_S = 8.0
"""Seconds that an abort may take; it frees the device from a collective whose peer does not come within one."""

LOOK_INTERVAL_S = 0.1
STUCK_S = 1.0
"""Seconds without a mark of progress after which the main thread may be blocked in a launch, or wait for the device."""

# torch's own watchdog ends the process when a communicator is aborted or stands still; both are for us to judge.
_NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


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

        for name, value in _NO_WATCHDOG.items():
            os.environ.setdefault(name, value)
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
        whole = tensor.contiguous()
        self._launch("all_reduce", self._opened().allreduce([whole], options))
        return tensor if whole is tensor else tensor.copy_(whole)

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.shape[0]
        parts = tensor.new_empty(self.size * rows, *tensor.shape[1:])
        options = AllgatherOptions()
        options.asyncOp = False
        self._launch("all_gather", self._opened()._allgather_base(parts, tensor.contiguous(), options))
        return parts.unflatten(0, (self.size, rows)).movedim(0, -2).flatten(-2)

    @contextmanager
    def guarded(self, attend: Callable[[], None]) -> Iterator[None]:
        """See `Communicator`. A launch can block the host, and so can a wait for the device: a thread attends.

        Raises:
            CollectiveBroken: the thread has aborted the communicator, so that what was computed means nothing.
        """
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(attend, over), name="watch nccl", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
        self._opened()

    def close(self) -> None:
        if self._nccl is None:
            return
        gc.collect()  # the abort would wait for a graph that only garbage holds
        self._abort()

    def _watch(self, attend: Callable[[], None], over: threading.Event) -> None:
        """Abort once another rank has failed and the main thread is stuck."""
        count, since = PROGRESS.count, time.monotonic()
        while not over.wait(LOOK_INTERVAL_S):
            if count != PROGRESS.count:
                count, since = PROGRESS.count, time.monotonic()
            elif time.monotonic() - since > STUCK_S:
                try:
                    attend()
                except BaseException:
                    with suppress(RankLost):  # the main thread will not get anywhere with it
                        self._abort()
                    return

    def _abort(self) -> None:
        """Free host and device from the collectives of this communicator.

        Raises:
            RankLost: it takes too long; only a new process can go on.
        """
        nccl, self._nccl = self._nccl, None
        if nccl is None:
            return
        closing = threading.Thread(target=nccl.abort, name="close nccl", daemon=True)
        closing.start()
        closing.join(CLOSING_TIMEOUT_S)
        if closing.is_alive():
            raise RankLost(f"NCCL has not let go of a communicator within {CLOSING_TIMEOUT_S:g} s")

    def _launch(self, what: str, work: Any) -> None:
        PROGRESS.launch(what)
        if work is not None:
            work.wait()  # has the current stream wait, not the host

    def _opened(self) -> Any:
        if self._nccl is None:
            raise CollectiveBroken("the communicator is closed")
        return self._nccl
