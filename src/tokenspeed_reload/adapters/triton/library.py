"""Triton's own classes, where the program has loaded it; nothing here imports it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FunctionType
from typing import Any


@dataclass(frozen=True)
class Triton:
    """The classes of the loaded Triton.

    Attributes:
        callable: what has source that kernels compile in: kernels, device and constexpr functions.
        interface: what can be launched with a grid, wrappers such as the autotuner included.
        function: a kernel.
        autotuner: the wrapper that keeps a choice of configuration by key.
        constexpr: a compile-time constant.
        interpreted: the stand-in for kernels under TRITON_INTERPRET=1, or None when it is not loaded.
        registry: the newest kernel by "module:qualname", where this version has such a table.
    """

    callable: type
    interface: type
    function: type
    autotuner: type
    constexpr: type
    interpreted: type | None
    registry: dict[str, Any]

    def kinds(self) -> set[type]:
        """All classes of kernels and their wrappers that exist now."""
        found: set[type] = {self.callable, self.interface}
        todo = list(found)
        while todo:
            known: type = todo.pop()
            fresh: set[type] = set(type.__subclasses__(known)) - found
            found.update(fresh)
            todo.extend(fresh)
        return found

    def is_source(self, value: Any) -> bool:
        """True for what has source of its own and a key by which it is compiled."""
        return issubclass(type(value), self.callable) and "_src" in vars(value)

    def is_interpreted(self, value: Any) -> bool:
        """True for the interpreter's stand-in of a kernel."""
        return self.interpreted is not None and issubclass(type(value), self.interpreted)

    def is_kernel(self, value: Any) -> bool:
        """True for a kernel, a device function, and whatever Triton's decorators put around one."""
        return issubclass(type(value), (self.callable, self.interface)) and "fn" in vars(value)


def triton() -> Triton | None:
    """Triton as it is loaded, or None."""
    jit = sys.modules.get("triton.runtime.jit")
    tuner = sys.modules.get("triton.runtime.autotuner")
    core = sys.modules.get("triton.language.core")
    try:
        return Triton(
            callable=jit.JITCallable,  # type: ignore[union-attr]
            interface=jit.KernelInterface,  # type: ignore[union-attr]
            function=jit.JITFunction,  # type: ignore[union-attr]
            autotuner=tuner.Autotuner,  # type: ignore[union-attr]
            constexpr=core.constexpr,  # type: ignore[union-attr]
            interpreted=getattr(sys.modules.get("triton.runtime.interpreter"), "InterpretedFunction", None),
            registry=getattr(jit, "_triton_jit_function_registry", {}),
        )
    except AttributeError:  # not loaded, or in the middle of its import
        return None


def chain(kernel: Any, library: Triton) -> list[Any]:
    """The wrappers around a kernel from the outside in, and the kernel itself last."""
    found = [kernel]
    while library.is_kernel(found[-1].fn) and len(found) < 16:
        found.append(found[-1].fn)
    return found


def function_of(kernel: Any, library: Triton) -> FunctionType | None:
    """The Python function inside of a kernel, if it is one."""
    function = chain(kernel, library)[-1].fn
    return function if type(function) is FunctionType else None


def is_tritons(module: str | None) -> bool:
    """True for modules of Triton itself, whose kernels depend on nothing that a program defines."""
    return module is not None and module.partition(".")[0] == "triton"


def is_rewritten(table: Any) -> bool:
    """True for the table in which the interpreter keeps what it made of the functions of kernels."""
    library = triton()
    return library is not None and table is getattr(library.interpreted, "rewritten_fn", None)
