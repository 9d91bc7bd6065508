"""A program that serves and exchanges kernels in its captured steps: `python swapping.py MODEL SCRATCH DEVICE`.

It runs in a process of its own, as `reloading.py` does, and prints what happened as one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from tests.gpu.reloading import KERNELS, LAYER, LAYER_RESULT, Program

Replacement = tuple[str, str]

CALLEES: dict[str, tuple[str, list[Replacement]]] = {
    "cuda": ("tokenspeed_kernel.ops.rope.triton", [("(second * cos + first * sin)", "(second * cos - first * sin)")]),
    "cpu": (
        "tokenspeed_kernel.ops.attention.reference",
        [("    return out.transpose(1, 2)\n", "    return out.transpose(1, 2) * 0.5\n")],
    ),
}
"""What kernels call, with another body."""

SPECIALISED: dict[str, tuple[str, list[Replacement]]] = {
    "cuda": (
        "tokenspeed_kernel.ops.attention.triton_decode",
        [
            ("mean / total[:, None], mask", "mean / total[:, None] * 0.5, mask"),
            ("(place, mean.", "(place, (mean * 0.5)."),
        ],
    ),
    "cpu": ("tokenspeed_kernel.ops.norm.reference", [("+ eps)", "+ eps + 0.5)")]),
}
"""A kernel that the graphs hold for several sizes or uses."""

SHARED_MEMORY: dict[str, Replacement] = {
    "cuda": ("active * up.to(tl.float32)", "active * up.to(tl.float32) + 0.125 * tl.sum(wide, axis=0)"),
    "cpu": ("silu(gate) * up", "silu(gate) * up + 0.125 * gate.sum()"),
}
"""A body that needs shared memory, in the place of one that needs none."""

LAUNCH: dict[str, list[Replacement]] = {
    "cuda": [("BLOCK = 1024", "BLOCK = 512"), ("num_warps=4", "num_warps=8")],
    "cpu": [
        ("from torch import Tensor", "from torch import Tensor\n\nSCALE = 1"),
        ("(x: Tensor)", "(x: Tensor, y: int = 1)"),
    ],
}
"""Edits of the module of the kernel that are more than its body."""

NO_PROOF: dict[str, Replacement] = {
    "cuda": ("active * up.to(tl.float32)", "active * up.to(tl.float32) * (1.0 + (out.to(tl.int64) // 512 % 1021))"),
    "cpu": ("silu(gate) * up", "silu(gate) * up * (1 + len(__import__('sys')._getframe(1).f_code.co_name))"),
}
"""A body whose result depends on where it is called from, or on where its result lies in memory."""


TOKENS = 12
"""Of each answer: the first steps of a batch run at the reload."""


class Swapping:
    """Edits, reloads, and looks at the graphs after each."""

    def __init__(self, program: Program, device: str):
        self.program = program
        self.device = device
        self.told: dict[str, Any] = {}
        self._sources: dict[str, str] = {}

    def reload(self, tag: str) -> None:
        """Reload under load, and compare every graph with the code by itself and with a new capture."""
        from tokenspeed.runtime.execution.swap import same_bits

        before, after, reply = self.program.reload_under_load(tag, TOKENS)
        executor = self.program.loop.executor
        fresh = executor.capture(0, lambda _: None)
        same, nodes = [], []
        for kind in ("decode", "prefill"):
            for size, graph in getattr(executor.generation, kind).items():
                again = getattr(fresh, kind)[size]
                eager = executor.computed(kind, size)
                same.append([same_bits(executor.computed(kind, size, each), eager) for each in (graph, again)])
                nodes.append([[node.name for node in each.nodes] for each in (graph, again)])
        self.told[tag] = {
            "reply": reply,
            "before": before,
            "after": after,
            "same": same,
            "nodes_alike": all(ours == others for ours, others in nodes),
            "generation": executor.generation.number,
            "memory": free_memory(self.device),
            "modules": len(executor.modules._known) if executor.modules is not None else 0,
        }

    def edit(self, tag: str, module: str, *replacements: Replacement) -> None:
        """Reload the module as it was at first, with some passages replaced; all others as they were."""
        self.program.restore()
        text = self._sources.get(module)
        if text is None:
            text = self._sources[module] = Path(str(importlib.import_module(module).__file__)).read_text()
        for old, new in replacements:
            assert old in text, f"{old!r} is not in {module}"
            text = text.replace(old, new)
        target = self.program.overlay.joinpath(*module.split(".")).with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        self.reload(tag)

    def restore(self, tag: str) -> None:
        """Reload with all as it was at first."""
        self.program.restore()
        self.reload(tag)


def main(model: Path, scratch: Path, device: str) -> dict[str, Any]:
    """Swap, swap back, fail in between, capture anew in between."""
    program = Program(model, scratch, device)
    program.start()
    swapping = Swapping(program, device)
    told = swapping.told
    told["original"] = program.serve("original", TOKENS)
    kernel, text = KERNELS[device]

    def scaled(factor: object) -> Replacement:
        return text, f"{text} * {factor}"

    for number, factor in enumerate((0.5, 0.25, 0.75)):
        swapping.edit(f"swap {number}", kernel, scaled(factor))
    swapping.edit("broken", kernel, scaled("undefined_name"))
    swapping.edit("swap after undo", kernel, scaled(0.5))
    swapping.edit("no proof", kernel, NO_PROOF[device])
    swapping.edit("swap after failed proof", kernel, scaled(0.25))
    swapping.edit("layer", LAYER, (LAYER_RESULT, f"{LAYER_RESULT} * 2"))
    swapping.restore("restored")
    swapping.edit("swap after recapture", kernel, scaled(0.5))
    for tag, (module, replacements) in (("callee", CALLEES[device]), ("specialised", SPECIALISED[device])):
        swapping.edit(tag, module, *replacements)
    swapping.edit("shared memory", kernel, SHARED_MEMORY[device])
    for number, replacement in enumerate(LAUNCH[device]):
        swapping.edit(f"launch {number}", kernel, replacement, scaled(0.5))
    swapping.restore("launches restored")
    for number in range(0 if device == "cpu" else 6):
        swapping.edit(f"again {number}", kernel, scaled(0.5))
        swapping.restore(f"again {number} restored")
    return told


def free_memory(device: str) -> int:
    """Bytes that nobody has on the GPU."""
    import torch

    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])))
