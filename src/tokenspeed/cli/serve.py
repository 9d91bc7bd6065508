"""`ts serve`: start the engine and the gateway, and stay until they stop."""

from __future__ import annotations

import argparse

from tokenspeed.cli.flags import add_flags, config_from
from tokenspeed.cli.gateway_flags import add_gateway_flags
from tokenspeed.cli.parser import Parser
from tokenspeed.modelname import locate

FLAGS_FROM_ELSEWHERE = {
    "--chunked-prefill-size": "--max-num-batched-tokens bounds the tokens of a step here",
    "--enable-chunked-prefill": "prefills are always cut to --max-num-batched-tokens here",
    "--enable-metrics": "metrics are always on, at the address in the ready line",
    "--trust-remote-code": "no code of a checkpoint is ever run here; leave it out",
    "--cuda-graph-max-bs": "--cudagraph-capture-sizes takes all the sizes here",
    "--pipeline-parallel-size": "layers are shared by --tensor-parallel-size only",
    "--pp-size": "layers are shared by --tensor-parallel-size only",
}
"""Flags of other engines that are none here, and what to do instead."""


def configure(parser: Parser) -> None:
    """Add the flags of the whole configuration."""
    parser.usage = "ts serve MODEL [options]"
    parser.epilog = (
        "All other flags of `smg launch` are passed on to the gateway; `smg launch --help` tells them. "
        "--allow-reload-forward and --reload-overlay are for development only: never enable them in "
        "production, and benchmark a final change on a freshly started server."
    )
    add_flags(parser)
    parser.set_defaults(gateway_flags=[])
    parser.more_flags = add_gateway_flags
    parser.hints = FLAGS_FROM_ELSEWHERE


def run(namespace: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM; 0 after an orderly stop."""
    gateway_flags: list[str] = namespace.gateway_flags
    config = config_from(namespace)
    locate(config.model.model, config.model.revision)

    from tokenspeed.gateway.stack import serve  # after these checks, so that --help and errors stay fast

    return serve(config, gateway_flags=gateway_flags)
