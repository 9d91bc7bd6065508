"""How a reload fails: in a phase on some rank, without a way back, or at the cost of a rank."""

from __future__ import annotations

from typing import Any

from tokenspeed.errors import TokenSpeedError
from tokenspeed.runtime.distributed.vote import Verdict
from tokenspeed.runtime.execution.executor import DeviceLost
from tokenspeed.runtime.reload.fault import NOWHERE, Fault, PlacedError

OTHER_COLLECTIVES = (
    "captured other collectives than the other ranks; every rank must call the same ones in the same order"
)
OTHER_RESULTS = (
    "computes other logits or samples other ids than the other ranks, and these must be equal in every bit; look for "
    "what differs by rank, time or hash order in the edit"
)


class PhaseFailed(Exception):
    """Some rank failed in a phase; every rank raises the same."""

    def __init__(self, phase: str, rank: int, fault: Fault):
        super().__init__(fault["error"])
        self.phase = str(fault.get("phase", phase))
        self.rank = rank
        self.device_lost = False
        self.fault = {name: value for name, value in fault.items() if name != "phase"}

    @classmethod
    def of(cls, verdict: Verdict, phase: str) -> PhaseFailed | None:
        """What a verdict says of `phase`; None when all ranks came through it alike."""
        failed = verdict.failed
        if failed is not None and failed.error is not None:
            # Of the rank that is to blame, where that is another one.
            failure = cls(phase, failed.rank if failed.culprit is None else failed.culprit, failed.error)
            failure.device_lost = verdict.device_lost
            return failure
        for rank, how in ((verdict.out_of_step, OTHER_COLLECTIVES), (verdict.odd, OTHER_RESULTS)):
            if rank is not None:
                return cls(phase, rank, {**NOWHERE, "error": f"rank {rank} {how}"})
        return None


class NotUndone(TokenSpeedError):
    """A failed edit could not be taken back whole: this rank holds a mixture of old and new code."""

    def __init__(self, why: list[str]):
        told = "; ".join(dict.fromkeys(why))
        super().__init__(f"a failed edit could not be undone ({told}); the ranks have to start anew")


class NoTokens(PlacedError):
    """An edited sampler gave ids beyond the vocabulary."""


class WeightsWritten(TokenSpeedError):
    """Edited code has written to weights."""


class CostRanks(DeviceLost):
    """A reload has failed and cost a rank its device: the ranks have to be replaced. `body` is the reply."""

    def __init__(self, body: dict[str, Any]):
        super().__init__(f"rank {body['rank']} cannot use its device after a reload that failed with: {body['error']}")
        self.body = body
