"""The errors that a user can cause. Each carries one sentence that says what to do, and an exit code."""


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
