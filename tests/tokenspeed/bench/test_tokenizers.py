"""Where `ts bench serve` finds the tokenizer that counts the tokens of its prompts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub import running_hub
from tests.tiny import tiny_llama
from tokenspeed.bench.tokenizers import find_tokenizer
from tokenspeed.errors import ConfigError

PROGRAM = """
from tokenspeed.bench.tokenizers import find_tokenizer
print(len(find_tokenizer("org/tiny").encode("one two three")))
"""


def test_of_a_model_on_the_hub_no_weights_are_fetched(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "tiny")
    with running_hub() as hub:
        hub.models["org/tiny"] = directory
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        # The library reads its settings once, when it is imported.
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env={**os.environ, **settings}, check=False
        )
    assert done.stdout.strip() == str(len(find_tokenizer(str(directory)).encode("one two three"))), done.stderr
    assert "tokenizer.json" in hub.fetched and not any(name.endswith(".safetensors") for name in hub.fetched)


def test_a_model_without_one_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give its directory with --tokenizer"):
        find_tokenizer(str(tmp_path))
