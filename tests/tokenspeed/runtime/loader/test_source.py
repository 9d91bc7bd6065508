from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import LlamaForCausalLM

from tokenspeed.errors import ModelError
from tokenspeed.runtime.config import ModelOptions
from tokenspeed.runtime.loader import bundled
from tokenspeed.runtime.loader.source import ModelSource, resolve
from tokenspeed.runtime.protocol.state import A_DOWNLOAD
from tokenspeed_kernel.progress import PROGRESS

WriteGGUF = Callable[..., Path]


def find(model: Path | str, load_format: str = "auto") -> ModelSource:
    return resolve(ModelOptions(model=str(model), load_format=load_format), print)


@pytest.fixture
def directory(tmp_path: Path, tiny_llama: LlamaForCausalLM) -> Path:
    path = tmp_path / "tiny"
    tiny_llama.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    (path / "tokenizer.json").write_text("{}")
    return path


def test_a_download_is_told_as_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fetch(progress: Callable[[str], None]) -> Path:
        seen.append(PROGRESS.waiting_for)
        return directory

    monkeypatch.setattr(bundled, "fetch_smollm2", fetch)
    monkeypatch.setattr(PROGRESS, "waiting_for", None)
    assert find("smollm2").path == directory
    assert find(directory).path == directory
    assert (seen, PROGRESS.waiting_for) == ([A_DOWNLOAD], None)


def test_a_directory(directory: Path) -> None:
    source = find(directory)
    assert (source.path, source.format, source.tokenizer_dir) == (directory, "safetensors", directory)
    assert (source.config.hidden_size, source.config.num_kv_heads) == (64, 2)
    assert source.config.eos_token_ids == (5,)
    assert source.default_sampling == {}


def test_generation_config_decides_what_ends_a_text(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 9], "top_p": 0.9}')
    source = find(directory)
    assert source.config.eos_token_ids == (7, 9)
    assert source.default_sampling == {"top_p": 0.9}
    (directory / "generation_config.json").write_text('{"temperature": 0.7}')
    assert find(directory).config.eos_token_ids == (5,)


def test_dummy_weights_need_only_the_configuration(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "tokenizer.json").unlink()
    source = find(directory, "dummy")
    assert (source.format, source.tokenizer_dir) == ("dummy", None)
    assert "has no tokenizer" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["vocab.json", "tiktoken.model", "qwen.tiktoken"])
def test_other_tokenizer_files(directory: Path, name: str) -> None:
    (directory / "tokenizer.json").rename(directory / name)
    assert find(directory).tokenizer_dir == directory


def test_a_relative_path_becomes_absolute(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory.parent)
    assert find("tiny").path == directory


@pytest.mark.parametrize("name", ["model.gguf", "without-suffix"])
def test_a_gguf_file(write_gguf: WriteGGUF, name: str) -> None:
    path = write_gguf(metadata={"general.sampling.top_k": 40}, name=name)
    source = find(path)
    assert (source.path, source.format, source.tokenizer_dir) == (path, "gguf", None)
    assert source.default_sampling == {"top_k": 40}
    assert find(path, "dummy").format == "dummy"


def test_the_bundled_model(smollm2: ModelSource) -> None:
    assert smollm2.format == "gguf"
    assert smollm2.tokenizer_dir is not None
    assert (smollm2.tokenizer_dir / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("", "no model is given"),
        ("/nowhere/at/all", "/nowhere/at/all does not exist"),
        ("x" * 5000, "cannot be read"),
    ],
)
def test_a_model_that_is_nowhere(model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        find(model)


def test_a_directory_that_is_no_model(tmp_path: Path, write_gguf: WriteGGUF) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json; name a directory"):
        find(tmp_path)
    path = write_gguf()
    with pytest.raises(ModelError, match=f"has no config.json; serve {path} itself"):
        find(tmp_path)


def test_weights_that_are_not_there(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        find(directory)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"config\.json cannot be read"),
        ("[1]", "holds no JSON object"),
        ('{"architectures": ["MambaForCausalLM"]}', "MambaForCausalLM"),
        ('{"architectures": 3}', "cannot be right"),
    ],
)
def test_a_configuration_that_cannot_be_used(directory: Path, content: str, message: str) -> None:
    (directory / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        find(directory)


def test_a_missing_size_is_named(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config.pop("num_hidden_layers")
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="num_hidden_layers"):
        find(directory)


def test_a_form_that_does_not_fit(directory: Path, write_gguf: WriteGGUF) -> None:
    with pytest.raises(ModelError, match=r"--load-format gguf needs a \.gguf file"):
        find(directory, "gguf")
    with pytest.raises(ModelError, match="--load-format safetensors needs a Hugging Face directory"):
        find(write_gguf(), "safetensors")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ModelError, match=r"notes\.txt is not a GGUF file"):
        find(path)


@pytest.mark.parametrize(
    "metadata",
    [
        {"split.count": "many"},
        {"llama.rope.freq_base": "high"},
        {"tokenizer.ggml.eos_token_id": "seven"},
        {"general.sampling.top_p": 7.0},
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": [1, 2]},
    ],
)
def test_metadata_of_another_type_is_one_sentence(write_gguf: WriteGGUF, metadata: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        find(write_gguf(metadata=metadata))


def test_a_gguf_that_ends_early(write_gguf: WriteGGUF) -> None:
    path = write_gguf({"token_embd.weight": (np.ones((64, 64), np.float32), gguf.GGMLQuantizationType.F32)})
    path.write_bytes(path.read_bytes()[:-9000])
    with pytest.raises(ModelError, match="is damaged"):
        find(path)
