"""Ports and addresses on this machine."""

from __future__ import annotations

import errno
import socket

from tokenspeed.errors import ConfigError, ResourceError

LOOPBACK = "127.0.0.1"


def claim(host: str, port: int) -> int:
    """A port that can be listened on: `port` itself, or a free one when it is 0.

    Raises:
        ConfigError: when `host` is no address of this machine.
        ResourceError: when the port is in use or needs rights that we lack.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise _no_address(host) from error
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            raise _refusal(host, port, error) from error
        claimed: int = probe.getsockname()[1]
        return claimed


def reachable(host: str) -> str:
    """The address to connect to for a server that listens on `host`, as it is written in a URL."""
    if host in ("0.0.0.0", ""):
        return LOOPBACK
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def _refusal(host: str, port: int, error: OSError) -> ConfigError | ResourceError:
    if error.errno == errno.EADDRINUSE:
        return ResourceError(f"port {port} on {host} is in use; stop its user or give another --port")
    if error.errno == errno.EACCES:
        return ResourceError(f"port {port} needs rights that this user lacks; give a --port of 1024 or more")
    if error.errno == errno.EADDRNOTAVAIL:
        return _no_address(host)
    return ResourceError(f"port {port} on {host} cannot be listened on ({error.strerror}); give another --port")


def _no_address(host: str) -> ConfigError:
    return ConfigError(f"--host {host} is not an address of this machine; give 127.0.0.1 or 0.0.0.0")
