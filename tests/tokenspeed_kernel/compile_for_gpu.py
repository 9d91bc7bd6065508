"""Compiles every Triton solution for sm_90 without a GPU, as bfloat16 and the sizes of real models specialise it.

Run as a program with TOKENSPEED_TRITON=1; prints one line a kernel: name, shared memory in bytes, instructions.
"""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tests.tokenspeed_kernel.launches import launch_all

SHARED_MEMORY = 227 * 1024
"""Bytes that one block may have on Hopper."""


def main() -> int:
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )
    launch, compiled = JITFunction.run, {}

    def compile_only(self: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> Any:
        kernel = launch(self, *args, warmup=True, **kwargs)
        compiled[kernel.hash] = kernel
        return kernel

    JITFunction.run = compile_only
    names = tuple(sys.argv[1:])
    launch_all(torch.device("cpu"), torch.bfloat16, lambda name: not names or name.startswith(names))
    for kernel in compiled.values():
        ptx = kernel.asm["ptx"]
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= SHARED_MEMORY, f"{kernel.name} wants {kernel.metadata.shared} bytes"
        units = sorted(set(re.findall(r"wgmma\.mma_async|mma\.sync|cp\.async\.cg|lg2\.approx|div\.full|div\.rn", ptx)))
        print(kernel.name, kernel.metadata.shared, len(ptx.splitlines()), *units)
    return 0


if __name__ == "__main__":
    sys.exit(main())
