"""Whether CuTe DSL is there, the package nvidia-cutlass-dsl, and what is registered of its solutions.

The DSL is optional, and takes seconds to import. Only the files with its kernels import it, and `cute_run`; they are
imported by the first launch of such a kernel, so that who wants none does not wait.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from tokenspeed.errors import ConfigError
from tokenspeed_kernel.triton_language import FORCE

INSTALLED = importlib.util.find_spec("nvidia_cutlass_dsl") is not None

HAS_CUTE = INSTALLED and (torch.version.cuda is not None or os.environ.get(FORCE) == "1")

CUTE: Mapping[str, Any] = MappingProxyType(
    {
        "solution": "cute",
        "priority": 4,
        "devices": ("cuda",),
        "dtypes": (torch.float32, torch.float16, torch.bfloat16),
        "capability": (8, 0),
    }
)
"""What `register_kernel` is told of every CuTe solution: less than Triton's, so that it runs when asked for."""


def load_cute() -> None:
    """Import the DSL, unless it is there.

    Raises:
        ConfigError: it is installed and cannot be imported, as beside a driver that is too old for it.
    """
    if "cutlass.cute" in sys.modules:
        return
    try:
        importlib.import_module("cutlass.cute")
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"CuTe DSL cannot be loaded ({error}); install 'tokenspeed[cute]' anew, or choose other kernels"
        ) from error


def cute_why_not() -> str:
    """Why there are no CuTe solutions, or nothing."""
    if HAS_CUTE:
        return ""
    if not INSTALLED:
        return "CuTe DSL is not installed; pip install 'tokenspeed[cute]'"
    return "this torch is built without CUDA, so that CuTe's kernels are left out"
