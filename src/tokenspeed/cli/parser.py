"""An argument parser whose every error is one sentence."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from tokenspeed.errors import ConfigError, nearest


class Parser(argparse.ArgumentParser):
    """Parses one subcommand; no abbreviations, and an unknown flag names the nearest known one.

    `more_flags` is called, if it is set, before flags are parsed that are not known so far: it may add some
    whose list takes time to get. `hints` tells what to do instead of flags that people know from elsewhere.
    """

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.more_flags: Callable[[Parser], None] | None = None
        self.hints: dict[str, str] = {}

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The parsed flags.

        Raises:
            ConfigError: for anything that cannot be parsed.
        """
        if self.more_flags is not None and any(map(self._is_unknown, arguments)):
            self.more_flags(self)
        # "Intermixed", because a plain parse takes an optional positional as missing when a flag comes first.
        namespace, rest = self.parse_known_intermixed_args(arguments)
        unknown = [argument for argument in rest if argument.startswith("-")]
        if unknown:
            flag = unknown[0].partition("=")[0]
            hint = self.hints.get(flag)
            raise ConfigError(
                f"there is no flag {flag}{f'; {hint}' if hint else nearest(flag, self._option_string_actions)}"
            )
        if rest:
            raise ConfigError(f"the argument {rest[0]} is one too many; `{self.prog} --help` tells the usage")
        return namespace

    def knows(self, flag: str) -> bool:
        """Whether `flag` is one of this parser's."""
        return flag in self._option_string_actions

    def _is_unknown(self, argument: str) -> bool:
        return argument.startswith("--") and argument != "--" and not self.knows(argument.partition("=")[0])

    def error(self, message: str) -> NoReturn:
        """Called by argparse for a flag that lacks its value or has a wrong one."""
        raise ConfigError(message.removeprefix("argument "))
