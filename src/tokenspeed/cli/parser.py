"""An argument parser whose every error is one sentence."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import NoReturn

from tokenspeed.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Parses one subcommand; no abbreviations, and an unknown flag names the nearest known one."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The parsed flags.

        Raises:
            ConfigError: for anything that cannot be parsed.
        """
        # "Intermixed", because a plain parse takes an optional positional as missing when a flag comes first.
        namespace, rest = self.parse_known_intermixed_args(arguments)
        unknown = [argument for argument in rest if argument.startswith("-")]
        if unknown:
            flag = unknown[0].partition("=")[0]
            raise ConfigError(f"there is no flag {flag}{nearest(flag, self._option_string_actions)}")
        if rest:
            raise ConfigError(f"the argument {rest[0]} is one too many; `{self.prog} --help` tells the usage")
        return namespace

    def error(self, message: str) -> NoReturn:
        """Called by argparse for a flag that lacks its value or has a wrong one."""
        raise ConfigError(message.removeprefix("argument "))


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known word that is most like `word`, or nothing."""
    import difflib  # only an error needs it

    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
