"""What the benchmarks without a server share: the flags of the engine."""

from __future__ import annotations

import argparse
from typing import Any

from tokenspeed.cli.flags import add_flags
from tokenspeed.errors import ConfigError
from tokenspeed.runtime.config import option_fields

GROUPS = ("model", "scheduler", "cache", "graphs", "parallel")
"""Options of `ts serve` that have a meaning here."""


def add_engine_flags(parser: argparse.ArgumentParser, own: Any) -> None:
    """Add the options of `ts serve` that have a meaning without a server, and what all of these benchmarks have."""
    own.add_argument("--output-json", metavar="FILE", help="save the figures as JSON")
    own.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    add_flags(parser, GROUPS)


def engine_settings(namespace: argparse.Namespace) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The model, the settings of `LLM`, and the benchmark's own flags.

    Raises:
        ConfigError: when the model is missing or given twice.
    """
    given = dict(vars(namespace))
    positional, named = given.pop("positional_model", None), given.pop("model", None)
    if positional is not None and named is not None:
        raise ConfigError("the model is given twice; give it either first or with --model, not both")
    model = positional or named
    if not model:
        raise ConfigError("there is no model; give what `ts serve` takes, such as the name smollm2")
    options = {option.name for _, option in option_fields()}
    settings = {name: value for name, value in given.items() if name in options}
    return model, settings, {name: value for name, value in given.items() if name not in options}
