"""`ts serve`: start the engine and the gateway, and stay until they stop."""

from __future__ import annotations

import argparse

from tokenspeed.cli.flags import add_flags, config_from


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the whole configuration."""
    parser.usage = "ts serve MODEL [options]"
    parser.epilog = (
        "--allow-reload-forward and --reload-overlay are for development only: never enable them in "
        "production, and benchmark a final change on a freshly started server."
    )
    add_flags(parser)


def run(namespace: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM; 0 after an orderly stop."""
    config = config_from(namespace)

    from tokenspeed.gateway.stack import serve  # after parsing, so that --help and errors stay fast

    return serve(config)
