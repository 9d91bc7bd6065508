"""A program that reloads and tells what is left behind: `python -m tests.gpu.residue MODEL SCRATCH DEVICE ROUNDS`.

A round is five reloads: a kernel that changes, a kernel and a layer, each of them broken, all as it was. It prints one
line of JSON: the free memory of the device in bytes after each round, and how often each kind of edit ended how.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.gpu.reloading import KERNELS, LAYER, LAYER_RESULT, Program


def main(model: Path, scratch: Path, device: str, rounds: int) -> dict[str, Any]:
    """Make the rounds; the code that serves at the end is the first."""
    program = Program(model, scratch, device)
    program.start()
    kernel, old = KERNELS[device]
    original = program.serve("original")
    outcomes, free = Counter[str](), list[int]()

    def reload(kind: str) -> None:
        program.call_reload()
        program.finish()
        reply = program.reply()
        how = reply["graphs"]["how"] if reply["success"] else f"failed in {reply['phase']}"
        outcomes[f"{kind}: {how}"] += 1

    for number in range(rounds):
        program.edit(kernel, old, f"{old} * {1 + number / 256}")
        reload("kernel")
        program.edit(LAYER, LAYER_RESULT, f"{LAYER_RESULT} * {1 + number / 256}")
        reload("kernel and layer")
        program.edit(kernel, old, f"{old} * undefined_name")
        reload("broken kernel")
        program.restore()
        program.edit(LAYER, LAYER_RESULT, f"{LAYER_RESULT}.reshape(-1, 7)")
        reload("broken layer")
        program.restore()
        reload("restored")
        assert program.serve(f"round {number} ") == original
        free.append(free_memory(device))
    return {"free": free, "outcomes": outcomes}


def free_memory(device: str) -> int:
    """Free bytes of the GPU, once nothing is pending; 0 on a CPU."""
    import torch

    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))))
