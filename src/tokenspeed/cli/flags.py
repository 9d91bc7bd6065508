"""Flags made from the configuration tree, and the configuration made from flags."""

from __future__ import annotations

import argparse
import types
from collections.abc import Container
from dataclasses import Field, fields, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, Union, get_args, get_origin, get_type_hints

from tokenspeed.errors import ConfigError
from tokenspeed.runtime.config import Config, option_fields, validate


def add_flags(parser: argparse.ArgumentParser, groups: Container[str] | None = None) -> None:
    """Add one flag for every option of `groups` (None: all), grouped as the tree is; an absent one leaves no trace."""
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    defaults = Config()
    for name, options in groupby(option_fields(), key=itemgetter(0)):
        if groups is not None and name not in groups:
            continue
        group = type(getattr(defaults, name))
        section = parser.add_argument_group(name, (group.__doc__ or "").splitlines()[0])
        hints = get_type_hints(group)
        for _, option in options:
            _add_flag(section, option, hints[option.name])


def config_from(namespace: argparse.Namespace) -> Config:
    """The validated configuration.

    Raises:
        ConfigError: when the model is missing or given twice, or when the settings cannot work together.
    """
    given = dict(vars(namespace))
    positional = given.pop("positional_model", None)
    if positional is not None:
        if "model" in given:
            raise ConfigError("the model is given twice; give it either first or with --model, not both")
        given["model"] = positional
    if not given.get("model"):
        raise ConfigError(
            "there is no model to serve; give a Hugging Face directory, a .gguf file, a hub id or the name smollm2"
        )
    _refuse_undecodable(given)
    config = Config(**{group.name: _filled(getattr(Config(), group.name), given) for group in fields(Config)})
    validate(config)
    return config


def _refuse_undecodable(given: dict[str, Any]) -> None:
    """Bytes that are no text came as lone surrogates, which the configuration's JSON cannot carry."""
    for name, value in given.items():
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ConfigError(f"the value of --{name.replace('_', '-')} is no UTF-8; rename it, or use a UTF-8 locale")


def _filled(group: Any, given: dict[str, Any]) -> Any:
    values = {option.name: given[option.name] for option in fields(group) if option.name in given}
    return replace(group, **{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})


def _add_flag(section: argparse._ArgumentGroup, option: Field[Any], hint: Any) -> None:
    kind, many = _value_type(hint)
    names = [f"--{option.name.replace('_', '-')}", *option.metadata["aliases"]]
    settings: dict[str, Any] = {
        "dest": option.name,
        "default": argparse.SUPPRESS,
        "help": _help(option).replace("%", "%%"),
    }
    if kind is bool:
        section.add_argument(names[0], action=argparse.BooleanOptionalAction, **settings)
        settings["help"] = argparse.SUPPRESS
        for others, action in (("aliases", "store_true"), ("negations", "store_false")):
            if option.metadata[others]:
                section.add_argument(*option.metadata[others], action=action, **settings)
        return
    settings |= {"type": kind, "choices": option.metadata["choices"]}
    if option.metadata["choices"] is None:
        settings["metavar"] = option.metadata["metavar"] or option.name.upper()
    if many:
        settings["nargs"] = "+"
    section.add_argument(*names, **settings)


def _value_type(hint: Any) -> tuple[type[Any], bool]:
    """The type of one value, and whether it takes several: `tuple[int, ...] | None` is `(int, True)`."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True
    return hint, False


def _help(option: Field[Any]) -> str:
    text: str = option.metadata["help"]
    if option.default in (None, "") or isinstance(option.default, bool) or "default" in text:
        return text
    return f"{text} (default: {option.default})"
