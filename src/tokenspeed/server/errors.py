"""What can go wrong with a request or with the engine behind it, as one sentence each."""

from __future__ import annotations

from tokenspeed.errors import RequestError, TokenSpeedError


class UnsupportedCall(RequestError):
    """A call of the service that is not there at all."""


class QueueFull(TokenSpeedError):
    """More requests wait than --max-queued-requests permits; the same one may pass later."""


class EngineUnavailable(TokenSpeedError):
    """The engine is starting, stopping or lost; nothing is wrong with the request itself."""


class EngineLost(EngineUnavailable):
    """A rank cannot go on. `exit_code` becomes that of the front process, if the engine cannot be had again."""

    def __init__(self, message: str, *, rank: int | None = None, exit_code: int = 1) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.file: str | None = None
        self.line: int | None = None
        self.text: str | None = None
        """Where the rank stood when it was last heard of, if that is known: file, line, and what is written there."""


class SubscriberTooSlow(TokenSpeedError):
    """A subscriber does not read what it subscribed to."""
