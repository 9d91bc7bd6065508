"""Keyword arguments of `LLM` to the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import msgspec

from tokenspeed.errors import ConfigError, nearest
from tokenspeed.runtime.config import Config, ServeOptions, option_fields, validate

GROUPS = ("model", "scheduler", "cache", "graphs", "parallel", "reload")
"""Groups of the configuration that have a meaning without a server."""


def config_from(model: str, settings: Mapping[str, Any]) -> Config:
    """The validated configuration of an engine without a server.

    Args:
        model: as `ts serve` takes it.
        settings: options by the names of the flags of `ts serve`, with underscores.

    Raises:
        ConfigError: for an unknown setting, or for one that cannot work.
    """
    options = {option.name: (group, option) for group, option in option_fields() if group in GROUPS}
    values: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for name, value in {**settings, "model": model}.items():
        if name not in options:
            raise ConfigError(
                f"LLM has no setting {name}{nearest(name, options)}; `ts serve --help` tells what they do"
            )
        group, option = options[name]
        choices = option.metadata["choices"]
        if choices is not None and value not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        values[group][name] = value
    base = Config(serve=ServeOptions(log_level="warning"))
    config = replace(base, **{group: _filled(type(getattr(base, group)), values[group]) for group in GROUPS})
    validate(config)
    return config


def _filled(group: type[Any], values: dict[str, Any]) -> Any:
    try:
        checked = msgspec.convert(values, group)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$.")
        named = {option.name for option in fields(group)} & {where.partition("[")[0].rstrip("`")}
        raise ConfigError(f"{', '.join(named) or 'a setting'}: {reason}") from error
    # msgspec leaves defaults to the class, and would not encode them.
    return group(**{name: getattr(checked, name) for name in values})
