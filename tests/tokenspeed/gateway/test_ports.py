"""Ports and addresses."""

from __future__ import annotations

import socket

import pytest

from tokenspeed.errors import ConfigError, ResourceError
from tokenspeed.gateway.ports import Address, claim


def test_port_0_is_a_free_one() -> None:
    address = claim("127.0.0.1", 0)
    assert address.port > 0
    assert claim(*address) == address


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use(host: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ResourceError, match="is in use"):
            claim(host, taken.getsockname()[1])


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "a..b"])
def test_an_address_of_another_machine(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--host {host} is not an address of this machine"):
        claim(host, 0)


@pytest.mark.parametrize(
    ("host", "reachable", "url"),
    [
        ("0.0.0.0", "127.0.0.1", "http://127.0.0.1:80"),
        ("::", "::1", "http://[::1]:80"),
        ("::1", "::1", "http://[::1]:80"),
        ("10.0.0.1", "10.0.0.1", "http://10.0.0.1:80"),
    ],
)
def test_where_to_connect(host: str, reachable: str, url: str) -> None:
    assert (Address(host, 80).reachable, Address(host, 80).url) == (reachable, url)


def test_a_name_becomes_a_number() -> None:
    assert claim("localhost", 0).host in ("127.0.0.1", "::1")
    assert claim("", 0).host in ("0.0.0.0", "::")


@pytest.mark.parametrize(("host", "local"), [("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("::", False)])
def test_who_can_reach_it(host: str, local: bool) -> None:
    assert Address(host, 80).is_local == local
