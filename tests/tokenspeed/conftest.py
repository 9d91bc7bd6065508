"""The bundled model's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

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
