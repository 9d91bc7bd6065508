"""Compiles kernels anew for what they were compiled for before. What this file reads of Triton has no public name."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tokenspeed.runtime.execution.graphs.base import CannotSwap, EditedKernel
from tokenspeed.runtime.execution.graphs.triton_kernels import LoadedKernel

MOST_THREADS = 8
"""Compiles at once. Most of a compile is outside of Python's lock: passes over the code, and ptxas."""


@dataclass(frozen=True)
class Specialisation:
    """What a kernel was compiled for before it was edited, and what came of that."""

    edited: EditedKernel
    device: int
    key: str
    """Types, constants and options, as Triton writes them."""
    compiled: Any

    def __hash__(self) -> int:
        return hash((id(self.compiled), self.key))

    @property
    def name(self) -> str:
        """Of the kernel."""
        return self.edited.name

    @property
    def function(self) -> int:
        """The CUfunction of before."""
        return int(self.compiled.function)

    def loaded(self, compiled: Any) -> LoadedKernel:
        """`compiled` as it lies on the device."""
        return LoadedKernel(compiled.name, self.key, self.edited.kernel, compiled)


def specialisations_of(edited: EditedKernel) -> Iterator[Specialisation]:
    """All that were launched before the edit."""
    for device, caches in edited.before.get("device_caches", {}).items():
        for key, compiled in list(caches[0].items()):
            if getattr(compiled, "function", None) is not None:
                yield Specialisation(edited, device, key, compiled)


def compile_all(wanted: Sequence[Specialisation]) -> dict[Specialisation, Any]:
    """Compile the edited kernels for these, several at once, and load them; each is found by later launches.

    Raises:
        CannotSwap: one does not compile, or cannot be loaded. What is wrong is told when the kernel is launched.
    """
    try:
        tasks = [_task(specialisation) for specialisation in wanted]
    except Exception as error:
        raise CannotSwap(f"this version of Triton keeps its kernels in another way ({error!r})") from error
    workers = max(1, min(len(tasks), MOST_THREADS, os.cpu_count() or 1))
    with ThreadPoolExecutor(workers, thread_name_prefix="compile") as pool:
        futures = [pool.submit(task) for task in tasks]
    compiled = {}
    for specialisation, future in zip(wanted, futures, strict=True):
        try:
            compiled[specialisation] = future.result()
            # Loads it, in the thread that has the context.
            _ = compiled[specialisation].run
        except Exception as error:
            why = type(error).__name__
            raise CannotSwap(f"{specialisation.name} cannot be compiled for what was captured ({why})") from error
    return compiled


def _task(specialisation: Specialisation) -> Callable[[], Any]:
    """What compiles a kernel for one specialisation, unless it has been."""
    kernel = specialisation.edited.kernel
    arguments, options = _recipe(specialisation)
    kernels, keys, _, backend, *_ = kernel.device_caches[specialisation.device]
    key = sys.modules["triton.runtime.jit"].compute_cache_key(keys, arguments, options)
    if key in kernels:
        return lambda: kernels[key]
    bound = {parameter.name: part[1] for parameter, part in zip(kernel.params, arguments, strict=False)}
    parsed, signature, constants, attributes = kernel._pack_args(backend, dict(options), bound, arguments, options)

    def compile_one() -> Any:
        return kernel._do_compile(key, signature, specialisation.device, constants, parsed, attributes, True)

    return compile_one


def _recipe(specialisation: Specialisation) -> tuple[list[Any], dict[str, Any]]:
    """What Triton made the key from: type and speciality of each argument, and the options of the launch."""
    keys = specialisation.edited.before["device_caches"][specialisation.device][1]
    for made_of, key in keys.items():
        if isinstance(key, str) and key == specialisation.key:
            arguments, options = made_of
            return list(arguments), ast.literal_eval(options)
    raise CannotSwap(f"how {specialisation.name} was launched is not known any more")
