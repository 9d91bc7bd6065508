"""TokenSpeed: an LLM inference server whose forward pass can be edited while it runs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenspeed.llm import LLM as LLM
    from tokenspeed.offline.params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_LAZY = {"LLM": "tokenspeed.llm", "SamplingParams": "tokenspeed.offline.params"}
"""Where a name comes from when it is asked for: most of what imports this package needs no model."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
