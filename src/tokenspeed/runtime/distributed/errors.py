"""What goes wrong between ranks, told apart by who caused it."""

from __future__ import annotations

from collections.abc import Iterator

from tokenspeed.errors import TokenSpeedError


class RankLost(TokenSpeedError):
    """A rank did not answer before the deadline."""


class CollectiveBroken(RuntimeError):
    """A collective ended because another rank left it: this rank is not to blame."""


class PeerFailed(BaseException):
    """Another rank has failed in this phase, and this one need not go on.

    No subclass of `Exception`, so that edited code does not take it for an error of its own.
    """

    def __init__(self, rank: int, error: str):
        super().__init__(f"rank {rank} failed: {error}")
        self.culprit = rank


class CollectiveMismatch(RuntimeError):
    """The ranks do not call the same collectives in the same order. `culprit` is the rank that is out of step."""

    def __init__(self, message: str, culprit: int):
        super().__init__(message)
        self.culprit = culprit


def is_victim(error: BaseException, rank: int) -> bool:
    """Whether `error`, raised on `rank`, or what it was raised for, only follows from a fault of another rank."""
    for cause in _causes(error):
        if isinstance(cause, CollectiveMismatch | PeerFailed):
            return cause.culprit != rank
        if isinstance(cause, CollectiveBroken):
            return True
    return False


def culprit(error: BaseException) -> int | None:
    """The rank that `error` blames, where it or what it was raised for blames one."""
    for cause in _causes(error):
        if isinstance(cause, CollectiveMismatch | PeerFailed):
            return cause.culprit
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
