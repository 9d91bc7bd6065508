"""Hub ids against a hub on this machine, each in a process of its own: the library reads its settings once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from tests.hub import Hub, running_hub

PROGRAM = """
import sys
from tokenspeed.errors import ModelError
from tokenspeed.runtime.loader.hub import fetch
name, revision, weights = sys.argv[1:]
try:
    print(fetch(name, revision or None, with_weights=weights == "weights", progress=lambda _: None))
except ModelError as error:
    print(f"refused: {error}")
"""

Fetch = Callable[..., str]


@pytest.fixture
def hub(tmp_path: Path, tiny_llama: LlamaForCausalLM) -> Iterator[Hub]:
    directory = tmp_path / "tiny"
    tiny_llama.save_pretrained(directory, max_shard_size="100KB")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "onnx").mkdir()
    (directory / "onnx" / "config.json").write_text("{}")
    (directory / "consolidated.safetensors").write_bytes(b"the same weights in another form")
    (directory / "pytorch_model.bin").write_bytes(b"and in a third one")
    (directory / "README.md").write_text("about it")
    with running_hub() as hub:
        hub.models["org/tiny"] = directory
        yield hub


@pytest.fixture
def fetch(hub: Hub, tmp_path: Path) -> Fetch:
    def fetch(name: str, revision: str = "", weights: str = "weights", **environment: str) -> str:
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", PROGRAM, name, revision, weights]
        env = {**os.environ, **settings, **environment}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return fetch


def test_only_what_serving_needs_is_fetched_and_only_once(hub: Hub, fetch: Fetch) -> None:
    directory = Path(fetch("org/tiny"))
    shards = set(json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"].values())
    assert len(shards) > 1
    expected = {"config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"} | shards
    assert {path.name for path in directory.iterdir()} == expected
    assert set(hub.fetched) == expected
    hub.fetched.clear()
    assert Path(fetch("org/tiny", hub.commit("org/tiny"))) == directory
    assert hub.fetched == []


def test_without_weights(hub: Hub, fetch: Fetch) -> None:
    assert fetch("org/tiny", weights="none")
    assert not any(name.endswith(".safetensors") for name in hub.fetched)


def test_a_model_in_the_cache_is_served_without_the_hub(hub: Hub, fetch: Fetch) -> None:
    directory = fetch("org/tiny")
    assert fetch("org/tiny", HF_ENDPOINT="http://127.0.0.1:9") == directory
    assert fetch("org/tiny", HF_HUB_OFFLINE="1") == directory


@pytest.mark.parametrize(
    ("name", "revision", "environment", "sentence"),
    [
        ("org/secret", "", {}, "org/secret is gated; accept its conditions at https://huggingface.co/org/secret"),
        ("org/none", "", {}, "org/none is neither a path here nor a model on the hub that you may see"),
        ("org/tiny", "v9", {}, "org/tiny has no revision v9"),
        ("org/a..b", "", {}, "org/a..b is neither a path here nor a hub id"),
        ("org/tiny", "", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "could not be fetched (ConnectError"),
        ("org/tiny", "", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids to fetch it"),
        ("org/empty", "", {}, "org/empty has no config.json"),
    ],
)
def test_what_cannot_be_fetched_is_one_sentence(
    hub: Hub, fetch: Fetch, tmp_path: Path, name: str, revision: str, environment: dict[str, str], sentence: str
) -> None:
    hub.gated.add("org/secret")
    hub.models["org/empty"] = tmp_path / "empty"
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "model.Q4.gguf").write_bytes(b"GGUF")
    answer = fetch(name, revision, **environment)
    assert answer.startswith("refused: ") and sentence in answer
    assert "\n" not in answer


def test_a_cache_that_cannot_be_written_is_one_sentence(fetch: Fetch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = fetch("org/tiny", HF_HOME=str(tmp_path / "file" / "hf"))
    assert answer.startswith("refused: org/tiny") and "could not be fetched" in answer
    assert "\n" not in answer
