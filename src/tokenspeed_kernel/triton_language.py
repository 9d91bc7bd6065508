"""The one place that imports Triton; kernels are written with its `triton` and `tl`, or with its `gluon` and `gl`.

Triton is optional. Where `AVAILABLE` is False no Triton solution is registered, and `why_not` says why.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

FORCE = "TOKENSPEED_TRITON"
"""Environment variable; 1 registers Triton's solutions on a machine without CUDA too, to list or compile them."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run on CPU tensors, one program after another."""

INSTALLED = importlib.util.find_spec("triton") is not None

# A torch without CUDA cannot run a kernel, and importing Triton takes half a second.
AVAILABLE = INSTALLED and (torch.version.cuda is not None or INTERPRETED or os.environ.get(FORCE) == "1")

DEVICES = ("cpu",) if INTERPRETED else ("cuda",)
"""Device types that Triton's solutions run on."""

CAPABILITY = (8, 0)
"""Least compute capability that Triton compiles for."""

TRITON: Mapping[str, Any] = MappingProxyType(
    {"solution": "triton", "priority": 10, "devices": DEVICES, "capability": CAPABILITY}
)
"""What `register_kernel` is told of every Triton solution."""

HAS_GLUON = AVAILABLE and not INTERPRETED
"""Whether there are solutions in Gluon, which Triton's interpreter does not run."""

GLUON: Mapping[str, Any] = MappingProxyType(
    {"solution": "gluon", "priority": 5, "devices": ("cuda",), "capability": CAPABILITY}
)
"""What `register_kernel` is told of every Gluon solution: less than Triton's, so that it runs when asked for."""

triton: Any = importlib.import_module("triton") if AVAILABLE else None
tl: Any = importlib.import_module("triton.language") if AVAILABLE else None
gluon: Any = importlib.import_module("triton.experimental.gluon") if HAS_GLUON else None
gl: Any = importlib.import_module("triton.experimental.gluon.language") if HAS_GLUON else None


def why_not() -> str:
    """Why there are no Triton solutions, or nothing."""
    if AVAILABLE:
        return ""
    if not INSTALLED:
        return "Triton is not installed, so that only torch's kernels run; pip install 'tokenspeed[gpu]'"
    return "this torch is built without CUDA, so that Triton's kernels are left out"
