"""Entry point of `ts` and `tokenspeed`: picks the subcommand, imports only that one, prints user errors."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from tokenspeed.cli.parser import Parser, nearest
from tokenspeed.errors import ConfigError, TokenSpeedError

COMMANDS = {
    "serve": "serve a model over the OpenAI API",
    "bench serve": "measure a running server under load",
    "bench latency": "measure how long one batch takes, without a server",
    "bench throughput": "measure how many tokens a second the engine makes, without a server",
    "reload-forward": "run the edited forward pass on a running server (development only)",
    "kernels": "list the kernels, and which ones a start would select and why",
    "env": "print the versions and the hardware that a bug report needs",
    "version": "print the version",
}
"""Name and summary of each subcommand; `bench serve` lives in `tokenspeed.cli.bench_serve`."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells give it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; without one, print the help and return 1."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(_help(), end="")
        return 1
    command, rest = _command(arguments)
    if command in ("-h", "--help"):
        print(_help(), end="")
        return 0
    if command in ("-V", "--version"):
        command = "version"
    label = f"ts {command}" if command in COMMANDS else "ts"
    try:
        return _run(command, rest)
    except TokenSpeedError as error:
        print(f"{label}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _command(arguments: list[str]) -> tuple[str, list[str]]:
    """The command, which may have two words, and its arguments; `bench` alone or with flags is `bench serve`."""
    first, *rest = arguments
    if not any(command.startswith(f"{first} ") for command in COMMANDS):
        return first, rest
    if not rest or rest[0].startswith("-"):
        return f"{first} serve", rest
    return f"{first} {rest[0]}", rest[1:]


def _run(command: str, arguments: list[str]) -> int:
    if command not in COMMANDS:
        raise ConfigError(f"there is no command {command}{nearest(command, COMMANDS)}; see `ts --help`")
    module = importlib.import_module(module_of(command))
    summary = COMMANDS[command]
    parser = Parser(prog=f"ts {command}", description=f"{summary[0].upper()}{summary[1:]}.")
    module.configure(parser)
    return int(module.run(parser.parse(arguments)))


def module_of(command: str) -> str:
    """The module that configures and runs a command."""
    return f"tokenspeed.cli.{command.replace('-', '_').replace(' ', '_')}"


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        (
            "usage: ts COMMAND [options]",
            "",
            "TokenSpeed: an LLM inference server whose forward pass can be edited while it runs.",
            "",
            "commands:",
            *lines,
            "",
            "`ts COMMAND --help` tells the options of a command, `ts --version` the version.",
            "",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
