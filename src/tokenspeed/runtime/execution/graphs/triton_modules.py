"""Modules of Triton's kernels on the device, which older versions of Triton never unload."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

from tokenspeed.runtime.execution.graphs.base import CaptureError
from tokenspeed.runtime.execution.graphs.cuda_nodes import NodeReader
from tokenspeed.runtime.execution.graphs.triton_kernels import loaded_kernels

log = logging.getLogger(__name__)


class KernelModules:
    """Unloads the module of each compiled kernel that is gone: then nothing can launch it, and no graph holds it.

    `packages` are the prefixes of the modules in which kernels are defined.
    """

    def __init__(self, reader: NodeReader, packages: Sequence[str]):
        self._reader = reader
        self._packages = packages
        self._known: dict[int, weakref.ref[Any]] = {}

    def note(self) -> None:
        """Remember what is loaded now."""
        if not self._reader.is_open:
            return
        for _, kernel in loaded_kernels(self._packages):
            compiled = kernel.compiled
            # A Triton that unloads for itself does so when the kernel is finalised.
            if not hasattr(type(compiled), "__del__") and compiled.module is not None:
                self._known[int(compiled.module)] = weakref.ref(compiled)

    def unload(self) -> int:
        """Unload what nobody holds any more, and return how many modules that were.

        To be called outside of captures, when the device has nothing left to do.
        """
        gone = [module for module, compiled in self._known.items() if compiled() is None]
        for module in gone:
            del self._known[module]
            try:
                self._reader.unload(module)
            except CaptureError as error:
                log.warning("a kernel that nothing uses any more stays on the device: %s", error)
        return len(gone)
