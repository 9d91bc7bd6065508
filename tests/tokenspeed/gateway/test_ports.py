"""Ports and addresses."""

from __future__ import annotations

import socket

import pytest

from tokenspeed.errors import ConfigError, ResourceError
from tokenspeed.gateway.ports import claim, reachable


def test_port_0_is_a_free_one() -> None:
    port = claim("127.0.0.1", 0)
    assert port > 0
    assert claim("127.0.0.1", port) == port


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use(host: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ResourceError, match="is in use"):
            claim(host, taken.getsockname()[1])


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--host {host} is not an address of this machine"):
        claim(host, 0)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("10.0.0.1", "10.0.0.1")],
)
def test_where_to_connect(host: str, expected: str) -> None:
    assert reachable(host) == expected
