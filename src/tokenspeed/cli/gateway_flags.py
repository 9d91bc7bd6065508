"""SMG's own flags on the command line of `ts serve`, which passes them on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from tokenspeed.cli.parser import Parser
from tokenspeed.errors import ConfigError


class Forward(argparse.Action):
    """Keeps the flag with its values, as it was given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        given = values if isinstance(values, list) else []
        namespace.gateway_flags = [*namespace.gateway_flags, option_string, *given]


class Refuse(argparse.Action):
    """Ends the command with the reason, which is the action's metavar."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        raise ConfigError(f"{option_string} is not for `ts serve`: {self.metavar}")


def add_gateway_flags(parser: Parser) -> None:
    """Let `parser` take the flags of the installed SMG that are not its own; they go to `gateway_flags`."""
    from tokenspeed.gateway.smg_flags import REFUSED, gateway_flags  # starts a process: only when it is needed

    for flag in gateway_flags():
        names = [name for name in flag.names if not parser.knows(name)]
        if not names:
            continue
        reason = next((REFUSED[name] for name in flag.names if name in REFUSED), None)
        parser.add_argument(
            *names,
            action=Forward if reason is None else Refuse,
            nargs=flag.nargs,
            dest="gateway_flags",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
            metavar=reason,
        )
