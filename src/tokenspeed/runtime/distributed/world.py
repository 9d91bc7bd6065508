"""The ranks of one engine: how they meet, and the communicators that they make."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import FileStore, PrefixStore, Store

from tokenspeed.errors import ResourceError
from tokenspeed.runtime.distributed.agreement import Agreement
from tokenspeed.runtime.distributed.communicator import Communicator
from tokenspeed.runtime.distributed.errors import RankLost
from tokenspeed.runtime.distributed.gloo import COLLECTIVE_TIMEOUT, LOOPBACK, MEETING_TIMEOUT, GlooCommunicator
from tokenspeed.runtime.distributed.group import Group
from tokenspeed.runtime.distributed.nccl import NcclCommunicator
from tokenspeed_kernel.progress import PROGRESS

log = logging.getLogger(__name__)


class World:
    """Makes the communicators of the groups of this rank.

    Every rank calls the same methods in the same order: each communicator meets in a namespace of its own, named by a
    number that rises on all of them alike. The ranks find each other through a file in `run_dir`, so that no port is
    taken. One rank alone needs no torch.distributed.
    """

    def __init__(self, rank: int, size: int, run_dir: Path, device: torch.device):
        self.rank = rank
        self.size = size
        self.run_dir = run_dir
        self.device = device
        self.group = Group("tp", rank, size) if size > 1 else Group.solo()
        self._made = 0
        self._why: str | None = None

    def join(self) -> None:
        """Meet the other ranks.

        Raises:
            ResourceError: they do not find each other.
        """
        if self.size == 1:
            return
        try:
            self._meet()
        except RuntimeError as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            advice = (
                "set NCCL_DEBUG=INFO to see why; in a container give /dev/shm more room"
                if self.device.type == "cuda"
                else "check that processes of this machine may connect over the loopback interface"
            )
            raise ResourceError(f"the ranks cannot exchange tensors ({first_line}); {advice}") from error

    def _meet(self) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        self._file = FileStore(str(self.run_dir / "store"), self.size)
        # Edited code may ask torch.distributed which rank it runs on. Nothing of ours goes over this group.
        with PROGRESS.waiting("other ranks"):
            torch.distributed.init_process_group(
                "gloo",
                store=PrefixStore("world", self._file),
                rank=self.rank,
                world_size=self.size,
                timeout=COLLECTIVE_TIMEOUT,
            )
        self.group.serving = self._communicator(COLLECTIVE_TIMEOUT)
        self.group.serving.open()

    @property
    def why_no_spare(self) -> str | None:
        """What is missing for a reload; None when nothing is."""
        if self.size == 1 or (self.group.spare is not None and self.group.agreement is not None):
            return None
        return self._why or "none was made"

    def make_spare(self) -> None:
        """Make what the next reload runs on, where that is missing. `why_no_spare` tells a failure."""
        if self.size == 1:
            return
        group, spare = self.group, self._communicator()
        agreement = Agreement(GlooCommunicator(self._namespace(), self.rank, self.size), self.rank, self.size)
        try:
            if group.spare is None:
                spare.open()
                group.spare = spare
            if group.agreement is None:
                agreement.open()
                group.agreement = agreement
        except RuntimeError as error:
            self._why = str(error).splitlines()[0]
            log.warning("no spare communicator could be made: %s", error)

    def renew_spare(self) -> None:
        """Close what a trial may have left in any state, and make it anew. No graph may hold it any more."""
        self.group.discard()
        self.make_spare()

    def leave(self) -> None:
        """Close all communicators. No graph may hold one any more."""
        try:
            self.group.close()
        except RankLost as error:
            log.warning("%s; the end of the process will", error)
        if self.size > 1:
            torch.distributed.destroy_process_group()

    def _communicator(self, meeting_timeout: timedelta = MEETING_TIMEOUT) -> Communicator:
        if self.device.type == "cuda":
            return NcclCommunicator(self._namespace(), self.rank, self.size, self.device)
        return GlooCommunicator(self._namespace(), self.rank, self.size, meeting_timeout)

    def _namespace(self) -> Store:
        self._made += 1
        return PrefixStore(f"communicator{self._made}", self._file)
