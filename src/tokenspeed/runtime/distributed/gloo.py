"""The collectives of ranks on CPUs, over gloo.

What gloo does, seen with torch 2.13: `abort` and `shutdown` of a process group free nobody, and neither does a
timeout of `wait`, which only stops the waiting. The destructor closes the sockets, which ends at once what any peer
waits for from this rank, with an error; but it joins the thread that runs a collective, and so blocks while this rank
has one open. Tensors of unlike sizes end the process of the receiver (`std::terminate`): what may not be alike has
to be compared before (`agreement`).
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Store, Work
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

from tokenspeed.runtime.distributed.communicator import Communicator
from tokenspeed.runtime.distributed.errors import CollectiveBroken
from tokenspeed_kernel.progress import PROGRESS

MEETING_TIMEOUT = timedelta(seconds=30)
"""How long a rank waits for the others when all make a communicator that they could do without."""

COLLECTIVE_TIMEOUT = timedelta(days=1)
"""gloo's own limit of a collective, and of a meeting without which nothing goes on: who stands still is found by other
means."""

LOOK_INTERVAL = timedelta(milliseconds=20)
"""How often a waiting collective looks whether it is still worth to wait."""

CLOSING_TIMEOUT_S = 2.0
"""Seconds that the thread of an open collective gets to end; one that does not is left behind with its sockets."""

LOOPBACK = "lo"
"""One machine: without a name gloo looks up the host's address, which may resolve to nothing."""


class GlooCommunicator(Communicator):
    """One process group of gloo, over loopback. `store` is a namespace of its own, where the ranks meet.

    `open` waits for `meeting_timeout` for the others.
    """

    def __init__(self, store: Store, rank: int, size: int, meeting_timeout: timedelta = MEETING_TIMEOUT):
        super().__init__()
        self.store = store
        self.rank = rank
        self.size = size
        self.meeting_timeout = meeting_timeout
        # torch's stubs know little of it.
        self._gloo: Any = None

    def open(self) -> None:
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(interface=LOOPBACK)]
        options._timeout = self.meeting_timeout
        options._threads = 1
        with PROGRESS.waiting("other ranks"):
            self._gloo = gloo(self.store, self.rank, self.size, options)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        options = AllreduceOptions()
        options.timeout = COLLECTIVE_TIMEOUT
        # gloo takes the memory behind a tensor for its elements, whatever the strides.
        whole = tensor.contiguous()
        self._wait("all_reduce", self._opened().allreduce([whole], options))
        return tensor if whole is tensor else tensor.copy_(whole)

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.shape[0]
        parts = tensor.new_empty(self.size * rows, *tensor.shape[1:])
        self.all_gather(parts, tensor.contiguous(), "all_gather")
        return parts.unflatten(0, (self.size, rows)).movedim(0, -2).flatten(-2)

    def all_gather(self, parts: torch.Tensor, tensor: torch.Tensor, what: str) -> None:
        """Fill `parts`, [size * n, ...], with every rank's `tensor`, [n, ...], in rank order."""
        options = AllgatherOptions()
        options.timeout = COLLECTIVE_TIMEOUT
        self._wait(what, self._opened()._allgather_base(parts, tensor, options))

    def close(self) -> None:
        if self._gloo is None:
            return
        # The destructor waits for an open collective, whose peer may never come.
        holder = [self._gloo]
        self._gloo = None
        closing = threading.Thread(target=holder.clear, name="close gloo", daemon=True)
        closing.start()
        closing.join(CLOSING_TIMEOUT_S)

    def _opened(self) -> Any:
        if self._gloo is None:
            raise CollectiveBroken("the communicator is closed")
        return self._gloo

    def _wait(self, what: str, work: Work) -> None:
        PROGRESS.launch(what)
        try:
            with PROGRESS.waiting(what):
                while True:
                    ended = work.is_completed()
                    try:
                        work.wait(LOOK_INTERVAL)
                        return
                    except RuntimeError as error:
                        # One that has not ended only told that the interval is over.
                        if ended:
                            raise CollectiveBroken(f"{what} broke off: {_first_line(error)}") from error
                    self.attend()
        finally:
            # It holds the sockets, and a traceback would hold it.
            del work


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
