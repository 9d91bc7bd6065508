"""`ts version`."""

from __future__ import annotations

import argparse

from tokenspeed import __version__


def configure(parser: argparse.ArgumentParser) -> None:
    """It takes no flags."""


def run(_: argparse.Namespace) -> int:
    """Print the version alone, so that scripts can read it."""
    print(__version__)
    return 0
