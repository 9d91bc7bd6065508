"""A hub id served by two ranks, fetched from a hub on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import SMALL
from tests.e2e.harness import HTTP, Server
from tests.hub import Hub, running_hub
from tests.waiting import PATIENCE


@pytest.fixture
def hub(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as hub:
        hub.models["org/tiny"] = tiny_model
        hub.revisions.add("v1")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        yield hub


def test_a_hub_id_is_fetched_once_and_served_under_its_name(hub: Hub, tiny_model: Path, tmp_path: Path) -> None:
    flags = (*SMALL, "--revision", "v1", "--tensor-parallel-size", "2", "--cors-allowed-origins", "http://example.com")
    server = Server("org/tiny", *flags, log=tmp_path / "log").start()
    try:
        assert server.served == "org/tiny"
        assert server.text("Hello")
        reply = HTTP.get(f"{server.url}/v1/models", headers={"Origin": "http://example.com"}, timeout=PATIENCE)
        assert reply.headers["access-control-allow-origin"] == "http://example.com"
    finally:
        server.stop()
    assert sorted(set(hub.fetched)) == sorted(path.name for path in tiny_model.iterdir())
