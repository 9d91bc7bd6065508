"""The Triton kernels that this process has loaded. What this file reads of Triton has no public name."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LoadedKernel:
    """One specialisation of one kernel, as it lies on the device."""

    name: str
    specialisation: str
    """Types, constants and options that it was compiled for: Triton's own key."""
    source: Any
    """The `triton.JITFunction`."""
    compiled: Any
    """The `CompiledKernel`; while it is held its code stays loaded."""

    @property
    def function(self) -> int:
        """Its CUfunction."""
        return int(self.compiled.function)

    @property
    def threads(self) -> int:
        """Of one block."""
        return 32 * int(self.compiled.metadata.num_warps)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory of one block."""
        return int(self.compiled.metadata.shared)


def loaded_kernels(packages: Sequence[str]) -> Iterator[tuple[int, LoadedKernel]]:
    """Every specialisation that was launched of a kernel defined in `packages`, by its CUfunction."""
    for jit_function in _jit_functions(packages):
        for cache in list(jit_function.device_caches.values()):
            for key, compiled in list(cache[0].items()):
                function = getattr(compiled, "function", None)
                if function is not None:
                    yield int(function), LoadedKernel(compiled.name, str(key), jit_function, compiled)


def _jit_functions(packages: Sequence[str]) -> Iterator[Any]:
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:
        return
    for name, module in list(sys.modules.items()):
        if any(name == package or name.startswith(f"{package}.") for package in packages):
            for value in list(vars(module).values()):
                # An autotuner or a heuristic wraps the function.
                while value is not None and not isinstance(value, jit.JITFunction):
                    value = vars(value).get("fn") if type(value).__module__.startswith("triton.") else None
                if value is not None:
                    yield value
