"""The ranks that share a layer, as the layer sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from tokenspeed.runtime.distributed.agreement import Agreement
from tokenspeed.runtime.distributed.communicator import Communicator
from tokenspeed.runtime.distributed.vote import Vote
from tokenspeed_kernel.launch import launch


class Group:
    """A named set of ranks. Layers keep the group; the communicator behind it is exchanged under them.

    `serving` is what the code that serves uses, and what its captured graphs hold. `spare` and `agreement` are those
    of a reload: the edited code runs on them within `trial`, so that whatever it does there leaves `serving` alone.
    With one rank every collective is the identity and nothing is launched.
    """

    def __init__(self, name: str, rank: int, size: int, serving: Communicator | None = None):
        self.name = name
        self.rank = rank
        self.size = size
        self.serving = serving
        self.spare: Communicator | None = None
        self.agreement: Agreement | None = None
        self._trying = False
        self._calls: list[str] | None = None
        self._known: dict[str, list[str]] = {}

    @classmethod
    def solo(cls) -> Group:
        """The group of a model that lives on one rank."""
        return cls("solo", 0, 1)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the ranks in place and return it; any shape."""
        if self.size == 1:
            return tensor
        reduced: torch.Tensor = launch("all_reduce", self._communicator("all_reduce", tensor).all_reduce, tensor)
        return reduced

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate [..., n] of every rank to [..., n * size], in rank order."""
        if self.size == 1:
            return tensor
        communicator = self._communicator("all_gather", tensor)
        gathered: torch.Tensor = launch("all_gather", communicator.all_gather_last, tensor)
        return gathered

    @contextmanager
    def recording(self, phase: str) -> Iterator[None]:
        """Remember which collectives the serving code calls in a phase that a reload runs again."""
        self._calls = []
        try:
            yield
            self._known[phase] = self._calls
        finally:
            self._calls = None

    @contextmanager
    def trial(self, phase: str, vote: Vote, *, runs: bool = True) -> Iterator[Agreement | None]:
        """Let every collective within go over the spare, once all ranks have agreed on it.

        Args:
            phase: a name under which `recording` may have remembered what the serving code calls.
            vote: of the phase; a collective that waits for another rank attends to it.
            runs: False where collectives are captured only, and need no agreement before each.
        """
        if self.size == 1:
            yield None
            return
        if self.spare is None or self.agreement is None:
            raise RuntimeError(f"group {self.name} has no spare communicator")
        before = self._known.get(phase)
        with self.agreement.phase(before, vote, runs=runs) as attend, self.spare.guarded(attend):
            self._trying = True
            try:
                yield self.agreement
            finally:
                self._trying = False

    def promote(self, calls: Mapping[str, list[str]]) -> None:
        """Let the spare serve. What served is the next spare: nothing failed on it, and no graph may hold it any more.

        Args:
            calls: what the new code called in each phase.
        """
        if self.spare is None:
            return
        self.serving, self.spare = self.spare, self.serving
        self.remember(calls)

    def remember(self, calls: Mapping[str, list[str]]) -> None:
        """Take `calls`, by phase, for what the serving code calls; graphs that stay go on with what served."""
        self._known.update(calls)

    def discard(self) -> None:
        """Close what a trial has used, which frees the peers that wait there. No graph may hold the spare any more."""
        spare, agreement = self.spare, self.agreement
        self.spare = self.agreement = None
        if agreement is not None:
            agreement.close()
        if spare is not None:
            spare.close()

    def close(self) -> None:
        """Close every communicator. No graph may hold one any more."""
        self.discard()
        serving, self.serving = self.serving, None
        if serving is not None:
            serving.close()

    def _communicator(self, what: str, tensor: torch.Tensor) -> Communicator:
        call = f"{what} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        if self._trying:
            assert self.spare is not None and self.agreement is not None
            self.agreement.agree(call)
            return self.spare
        if self._calls is not None:
            self._calls.append(call)
        if self.serving is None:
            raise RuntimeError(f"group {self.name} has {self.size} ranks and no communicator")
        return self.serving
