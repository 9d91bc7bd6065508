"""Servers that several tests share. Each is one `ts serve` with everything behind it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import RUNNING, Server
from tests.tiny import tiny_llama

SMALL = ("--max-num-seqs", "64", "--max-total-tokens", "16384")
GRAPHS = ("--cpu-graphs", "--cudagraph-capture-sizes", "1", "4", "--prefill-graph-max-tokens", "64")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that hung shows what each server printed, and where it is."""
    report = yield
    if call.excinfo is not None and "from pytest-timeout" in str(call.excinfo.value):
        for server in RUNNING:
            if server.process.poll() is None:
                report.sections.append((f"server {server.model}", server.stacks()))
    return report


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny random Llama."""
    return tiny_llama(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The bundled model, without the reload flag."""
    folder = tmp_path_factory.mktemp("smollm2")
    server = Server("smollm2", *SMALL, "--max-model-len", "1024", log=folder / "log")
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module", params=["eager", "graphs", "two-ranks"])
def reloadable(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A tiny model that permits reloads: eager, with CPU graphs, and with graphs on two ranks."""
    folder = tmp_path_factory.mktemp(request.param)
    flags = {"eager": (), "graphs": GRAPHS, "two-ranks": (*GRAPHS, "--tensor-parallel-size", "2")}[request.param]
    server = Server(str(tiny_model), *SMALL, *flags, overlay=folder / "overlay", log=folder / "log")
    server.start()
    yield server
    server.stop()
