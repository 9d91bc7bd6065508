"""The errors that a user can cause. Each carries one sentence that says what to do, and an exit code."""

from __future__ import annotations

from collections.abc import Iterable


class TokenSpeedError(Exception):
    """Root of every error whose message is written for the user; printed without a traceback."""

    exit_code = 1


class ConfigError(TokenSpeedError):
    """A flag or a combination of flags that cannot work."""

    exit_code = 2


class ModelError(TokenSpeedError):
    """A model that is missing, damaged or of an architecture that is not supported."""

    exit_code = 3


class ResourceError(TokenSpeedError):
    """Too little memory, a port in use, a device that is not there."""

    exit_code = 4


class RequestError(TokenSpeedError):
    """A request that cannot be served as it was sent; the server itself goes on."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known word that is most like `word`, or nothing."""
    import difflib  # only an error needs it

    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
