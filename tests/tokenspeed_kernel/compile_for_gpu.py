"""Compiles Triton's and Gluon's solutions for sm_90 without a GPU, as bfloat16 and the sizes of real models ask for.

Run as a program with TOKENSPEED_TRITON=1; prints one line a kernel: name, file, shared memory in bytes,
instructions.
"""

from __future__ import annotations

import re
import sys

import torch

from tests.tokenspeed_kernel.hopper import SHARED_MEMORY, hopper
from tests.tokenspeed_kernel.launches import launch_all
from tokenspeed.runtime.execution.graphs.triton_kernels import loaded_kernels


def main() -> int:
    names = tuple(sys.argv[1:])
    with hopper():
        launch_all(torch.device("cpu"), torch.bfloat16, lambda name: not names or name.startswith(names))
    for _, loaded in loaded_kernels(("tokenspeed_kernel.ops",)):
        kernel = loaded.compiled
        ptx = kernel.asm["ptx"]
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= SHARED_MEMORY, f"{kernel.name} wants {kernel.metadata.shared} bytes"
        units = sorted(set(re.findall(r"wgmma\.mma_async|mma\.sync|cp\.async\.cg|lg2\.approx|div\.full|div\.rn", ptx)))
        file = loaded.source.fn.__module__.rpartition(".")[2]
        print(kernel.name, file, kernel.metadata.shared, len(ptx.splitlines()), *units)
    return 0


if __name__ == "__main__":
    sys.exit(main())
