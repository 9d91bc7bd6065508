"""Servers that several tests share. Each is one `ts serve` with everything behind it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
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


def reloading(model: Path, tmp_path_factory: pytest.TempPathFactory, name: str, flags: Sequence[str]) -> Server:
    """A server that permits reloads, just started, with its overlay and log in a folder of that name."""
    folder = tmp_path_factory.mktemp(name)
    return Server(str(model), *flags, overlay=folder / "overlay", log=folder / "log").start()


@contextmanager
def shared(start: Callable[[], Server]) -> Iterator[Callable[[], Server]]:
    """`running()` is one server for many tests; one that has ended is started anew."""
    started: list[Server] = []

    def running() -> Server:
        if not started or started[-1].process.poll() is not None:
            started.append(start())
        return started[-1]

    try:
        yield running
    finally:
        for server in started:
            server.stop()


def restored(server: Server) -> Iterator[Server]:
    """The server for one test; whatever that does to it, and however it ends, the next one finds the installed code."""
    try:
        yield server
    finally:
        try:
            server.restore()
        except BaseException:
            server.kill()
            raise


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """`tiny_server(kind)` is a tiny model that permits reloads, one server for all tests: a key of `KINDS`."""

    start = partial(reloading, tiny_model, tmp_path_factory)
    with ExitStack() as stack:
        running = {
            kind: stack.enter_context(shared(partial(start, kind, (*SMALL, *flags)))) for kind, flags in KINDS.items()
        }
        yield lambda kind: running[kind]()


@pytest.fixture(params=KINDS)
def reloadable(request: pytest.FixtureRequest, tiny_server: Callable[[str], Server]) -> Iterator[Server]:
    """A tiny model that permits reloads, of every kind."""
    yield from restored(tiny_server(request.param))


@pytest.fixture
def alone(tiny_server: Callable[[str], Server]) -> Iterator[Server]:
    """A tiny model on one rank, which permits reloads."""
    yield from restored(tiny_server("eager"))


@pytest.fixture
def pair(tiny_server: Callable[[str], Server]) -> Iterator[Server]:
    """A tiny model on two ranks with graphs, which permits reloads."""
    yield from restored(tiny_server("two-ranks"))
