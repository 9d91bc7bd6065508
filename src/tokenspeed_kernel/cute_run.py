"""How kernels in CuTe DSL are compiled and launched. This file knows the DSL, and needs torch for a launch only."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.cute.runtime import make_ptr

from tokenspeed_kernel.jit import note_compile

if TYPE_CHECKING:
    from torch import Tensor

STREAM = CUstream(0)
"""Stands for the stream of a launch while its function is compiled."""

_TYPES = {"float32": cutlass.Float32, "float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}


def compile_cute(function: Any, *args: Any) -> Any:
    """What `cute.compile` makes of a `@cute.jit` function; counted and timed as a compile."""
    started = time.perf_counter()
    compiled = cute.compile(function, *args)
    note_compile(compiled, time.perf_counter() - started)
    return compiled


def run_cute(compiled: Any, *args: Tensor | float) -> None:
    """Launch on torch's current stream, which is the last argument of the compiled function.

    Args:
        compiled: of `compile_cute`.
        args: tensors, whose addresses are passed, and numbers.
    """
    from torch import Tensor, cuda

    passed = [pointer(arg.dtype, arg.data_ptr()) if isinstance(arg, Tensor) else arg for arg in args]
    compiled(*passed, CUstream(cuda.current_stream().cuda_stream))


def pointer(dtype: Any, address: int = 16) -> Any:
    """A pointer into the memory of the device, aligned for one element of a type of torch or its name."""
    kind = _TYPES[str(dtype).removeprefix("torch.")]
    return make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=kind.width // 8)
