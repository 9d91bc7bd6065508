"""SMG's flags as its help tells them, against its own parser."""

from __future__ import annotations

import argparse

import pytest
from smg.router_args import RouterArgs

from tokenspeed.cli.parser import Parser
from tokenspeed.cli.serve import configure
from tokenspeed.errors import ConfigError
from tokenspeed.gateway.ports import Address
from tokenspeed.gateway.smg import smg_command
from tokenspeed.gateway.smg_flags import REFUSED, check_gateway_flags, gateway_flags
from tokenspeed.runtime.config import Config, ReloadOptions, ServeOptions

REPLACEABLE = {"--policy", "--prometheus-host", "--prometheus-port", "--request-timeout-secs"}
"""Flags that `ts serve` sets as defaults: the user's own come after them and win."""


def its_actions() -> list[argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(parser)
    return [action for action in parser._actions if action.option_strings]


def parse(*arguments: str) -> argparse.Namespace:
    parser = Parser(prog="ts serve", description="")
    configure(parser)
    return parser.parse(arguments)


def test_every_flag_of_smg_is_known_with_its_number_of_values() -> None:
    told = {flag.names: flag.nargs for flag in gateway_flags()}
    expected = {}
    for action in its_actions():
        flags = [name for name in action.option_strings if name.startswith("--")]
        expected[tuple(flags)] = 1 if action.nargs is None else action.nargs
    assert told == expected


def test_every_flag_that_ts_serve_sets_is_its_own_or_refused_or_replaceable() -> None:
    own = Parser(prog="ts serve", description="")
    configure(own)
    config = Config(serve=ServeOptions(api_key="k"), reload=ReloadOptions(allow_reload_forward=True))
    command = smg_command(config, Address("127.0.0.1", 8000), 9100, 29000)
    assert {
        flag
        for flag in command
        if flag.startswith("--") and not own.knows(flag) and flag not in REFUSED and flag not in REPLACEABLE
    } == set()


def test_every_refused_flag_is_one_of_smg() -> None:
    assert REFUSED.keys() <= {name for action in its_actions() for name in action.option_strings}


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_a_refused_flag_says_why(flag: str) -> None:
    with pytest.raises(ConfigError, match="is not for `ts serve`"):
        parse("m", flag, "1")


def test_flags_are_forwarded_as_they_were_given_wherever_they_stand() -> None:
    own = ["--max-num-seqs", "4"]
    given = parse(
        "--policy", "cache_aware", "--enable-igw", *own, "m", "--queue-size=7", "--cors-allowed-origins", "a", "b"
    )
    assert given.gateway_flags == [
        *("--policy", "cache_aware"),
        "--enable-igw",
        *("--queue-size", "7"),
        *("--cors-allowed-origins", "a", "b"),
    ]
    assert (given.positional_model, given.max_num_seqs) == ("m", 4)


def test_a_flag_of_both_is_ours() -> None:
    given = parse("m", "--block-size", "32", "--model-path", "n", "--queue-size", "1")
    assert (given.block_size, given.model, given.gateway_flags) == (32, "n", ["--queue-size", "1"])


def test_values_are_checked_by_smg_itself() -> None:
    check_gateway_flags(["--policy", "cache_aware", "--queue-size", "7"])
    with pytest.raises(ConfigError, match=r"the gateway refuses --policy: invalid choice: 'best'"):
        check_gateway_flags(["--policy", "best"])
