"""What can be wrong with a grammar, and whether there is a compiler at all."""

from __future__ import annotations

import importlib.util

from tokenspeed.errors import RequestError


class GrammarError(RequestError):
    """A grammar that cannot be compiled."""


def is_installed() -> bool:
    """Whether xgrammar is there; it is not imported."""
    return importlib.util.find_spec("xgrammar") is not None
