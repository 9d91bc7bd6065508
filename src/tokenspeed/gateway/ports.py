"""Ports and addresses on this machine."""

from __future__ import annotations

import errno
import socket
from ipaddress import ip_address
from typing import NamedTuple

from tokenspeed.errors import ConfigError, ResourceError

LOOPBACK = "127.0.0.1"


class Address(NamedTuple):
    """Where to listen: a numeric IPv4 or IPv6 address, and a port."""

    host: str
    port: int

    @property
    def reachable(self) -> str:
        """The address to connect to from this machine."""
        return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(self.host, self.host)

    @property
    def url(self) -> str:
        """Where a client on this machine finds the server."""
        host = self.reachable
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return ip_address(self.host).is_loopback


def claim(host: str, port: int) -> Address:
    """An address that can be listened on: `host` by its number, with `port` itself or a free one when it is 0.

    Raises:
        ConfigError: when `host` is no address of this machine.
        ResourceError: when the port is in use or needs rights that we lack.
    """
    try:
        flags = socket.AI_PASSIVE  # no host means all addresses
        family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise _no_address(host) from error
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            raise _refusal(host, port, error) from error
        name = probe.getsockname()
        return Address(name[0], name[1])


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
