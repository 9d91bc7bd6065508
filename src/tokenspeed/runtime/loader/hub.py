"""Models of the Hugging Face hub: only the files that serving needs, in the hub's own cache."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tokenspeed.errors import ModelError
from tokenspeed.runtime.loader.layout import INDEX, SINGLE

METADATA = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
"""Configuration, tokenizer and chat template, all of which lie at the top of a repository."""

ELSEWHERE = "*/*"
"""Folders of a repository hold the same model in other forms."""


def fetch(name: str, revision: str | None, *, with_weights: bool, progress: Callable[[str], None]) -> Path:
    """Directory of the model `name`, such as `org/name`; what is in the cache already is not fetched again.

    Where the hub cannot be reached, a model that was fetched before is served as it is in the cache.

    Raises:
        ModelError: if the model is not there or not for this user, or if it cannot be fetched.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when the library is imported
    progress(f"looking for {name} on the hub")
    directory = _snapshot(name, revision, list(METADATA))
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{name} has no config.json; name a repository in transformers' form, "
            "or download one .gguf file of it and serve that"
        )
    if with_weights:
        files = _weight_files(directory)
        if not all((directory / file).is_file() for file in files):
            progress(f"fetching {len(files)} weight file(s) of {name}")
            # The commit that was found first: a branch may move on meanwhile.
            directory = _snapshot(name, directory.name, files)
    return directory


def _weight_files(directory: Path) -> list[str]:
    """Names of the weight files; a damaged index is told by whoever reads the weights."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        return sorted(set(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    return [SINGLE]


def _snapshot(name: str, revision: str | None, patterns: list[str]) -> Path:
    import huggingface_hub  # takes half a second, which only hub ids need
    from huggingface_hub import errors

    try:
        found = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=patterns, ignore_patterns=[ELSEWHERE]
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{name} is gated; accept its conditions at https://huggingface.co/{name}, then set HF_TOKEN to a token "
            "of yours"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{name} is neither a path here nor a model on the hub that you may see; check the spelling, or set "
            "HF_TOKEN if it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{name} has no revision {revision}; give a branch, tag or commit of it") from error
    except errors.HFValidationError as error:
        raise ModelError(f"{name} is neither a path here nor a hub id ({_first_line(error)})") from error
    except Exception as error:  # the library's own, those of its HTTP client, and those of the disk
        raise ModelError(_not_fetched(name, error)) from error
    return Path(found)


def _not_fetched(name: str, error: Exception) -> str:
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return f"{name} is not in the hub's cache, and HF_HUB_OFFLINE forbids to fetch it; unset that or give a path"
    cause = error.__cause__ or error
    return (
        f"{name} is neither a path here nor in the hub's cache, and could not be fetched "
        f"({type(cause).__name__}: {_first_line(cause)}); check the network, HF_ENDPOINT and the room on the disk, "
        "or give a path"
    )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
