"""Servers that several tests share. Each is one `ts serve` with everything behind it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import RUNNING, Server
from tests.tiny import tiny_llama

SMALL = ("--max-num-seqs", "64", "--max-total-tokens", "16384")
GRAPHS = ("--cpu-graphs", "--cudagraph-capture-sizes", "1", "4", "--prefill-graph-max-tokens", "64")
KINDS = {"eager": (), "graphs": GRAPHS, "two-ranks": (*GRAPHS, "--tensor-parallel-size", "2")}
LIMIT = 480
"""Seconds for one test. Then it fails with the stacks of all processes, and the others run."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(LIMIT))


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


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """`tiny_server(kind)` is a tiny model that permits reloads, one server for all tests: a key of `KINDS`."""
    started: dict[str, Server] = {}

    def running(kind: str) -> Server:
        if kind not in started or started[kind].process.poll() is not None:
            folder = tmp_path_factory.mktemp(kind)
            flags = (*SMALL, *KINDS[kind])
            server = Server(str(tiny_model), *flags, overlay=folder / "overlay", log=folder / "log")
            started[kind] = server.start()
        return started[kind]

    yield running
    for server in started.values():
        server.stop()


@pytest.fixture(scope="module", params=KINDS)
def reloadable(request: pytest.FixtureRequest, tiny_server: Callable[[str], Server]) -> Iterator[Server]:
    """A tiny model that permits reloads, of every kind."""
    server = tiny_server(request.param)
    yield server
    server.restore()


@pytest.fixture(scope="module")
def alone(tiny_server: Callable[[str], Server]) -> Iterator[Server]:
    """A tiny model on one rank, which permits reloads."""
    server = tiny_server("eager")
    yield server
    server.restore()


@pytest.fixture(scope="module")
def pair(tiny_server: Callable[[str], Server]) -> Iterator[Server]:
    """A tiny model on two ranks with graphs, which permits reloads."""
    server = tiny_server("two-ranks")
    yield server
    server.restore()
