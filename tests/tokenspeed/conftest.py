"""The bundled model's tokenizer, and ranks in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import RankProcesses
from tests.tiny import tiny_llama
from tokenspeed.offline.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with tokenizer files."""
    return tiny_llama(tmp_path_factory.mktemp("offline-model"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    tokenizer = Tokenizer(tokenizer_dir)
    tokenizer.open()
    return tokenizer


@pytest.fixture(scope="session")
def rank_processes() -> Iterator[RankProcesses]:
    """Four processes that are ranks of one engine after the other."""
    processes = RankProcesses(4)
    processes.start()
    yield processes
    processes.stop()
