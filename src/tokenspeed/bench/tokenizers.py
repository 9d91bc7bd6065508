"""The tokenizer that counts the tokens of prompts."""

from __future__ import annotations

from pathlib import Path

from tokenspeed.errors import ConfigError, TokenSpeedError
from tokenspeed.offline.tokenizer import Tokenizer


def find_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a model by the name or path that `ts serve` takes.

    Raises:
        ConfigError: when there is none.
    """
    directory = Path(name)
    try:
        if not (directory / "tokenizer.json").is_file():
            directory = _directory_of_model(name)
        tokenizer = Tokenizer(directory)
        tokenizer.open()
    except TokenSpeedError as error:
        raise ConfigError(f"{name} has no tokenizer here ({error}); give its directory with --tokenizer") from error
    return tokenizer


def _directory_of_model(name: str) -> Path:
    from tokenspeed.runtime.config import ModelOptions
    from tokenspeed.runtime.loader.source import resolve

    # Dummy weights are not fetched from the hub.
    source = resolve(ModelOptions(model=name, load_format="dummy"), lambda _: None)
    if source.tokenizer_dir is None:
        raise ConfigError(f"{source.path} brings no tokenizer")
    return source.tokenizer_dir
