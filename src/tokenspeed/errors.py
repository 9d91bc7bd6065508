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


LONGEST_CAUSE = 1000
"""Characters of another's error that are told to a client: they have to fit into the header of an answer."""


def cause_of(error: BaseException) -> str:
    """An error of edited code as "Type: message": bounded, and in text that every encoding of Unicode takes."""
    try:
        message = str(error)
    except BaseException as second:
        message = f"(its message cannot be made: {type(second).__name__})"
    told = f"{type(error).__name__}: {message}".removesuffix(": ")
    cut = f"{told[:LONGEST_CAUSE]}..." if len(told) > LONGEST_CAUSE else told
    return cut.encode("utf-8", "backslashreplace").decode()


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known word that is most like `word`, or nothing."""
    import difflib  # only an error needs it

    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
