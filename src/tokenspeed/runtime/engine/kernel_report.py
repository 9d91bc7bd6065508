"""What `ts kernels` tells, as one JSON object; run as a program whose argument is its options as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tokenspeed.errors import TokenSpeedError
from tokenspeed.runtime.config import KernelOptions, ModelOptions
from tokenspeed.runtime.engine.kernels import apply_flags
from tokenspeed.runtime.execution.device import cuda_problem, pick_dtype
from tokenspeed.runtime.loader.source import resolve
from tokenspeed_kernel.registry import REGISTRY, Kernel, KernelError, Request, capability_of
from tokenspeed_kernel.tactics import TACTICS, tactics_file
from tokenspeed_kernel.triton_language import INSTALLED

HEAD_DIM = 128
"""Of the model that is assumed where none is named."""


def report(model: ModelOptions, kernels: KernelOptions) -> dict[str, Any]:
    """Every solution of every operation, which one a start would select, and what was tuned on this machine.

    Raises:
        TokenSpeedError: for a model or an override that is not there.
    """
    apply_flags(kernels)
    asked = model.device if model.device != "auto" else ("cpu" if cuda_problem() else "cuda")
    device = torch.device(asked)
    checkpoint, head_dim = "bfloat16", HEAD_DIM
    if model.model:
        config = resolve(model, lambda _: None).config
        checkpoint, head_dim = config.torch_dtype, config.head_dim
    there = device.type == "cpu" or cuda_problem() is None
    dtype = pick_dtype(model.dtype, checkpoint, device if there else torch.device("meta"))
    TACTICS.load(tactics_file() if device.type == "cuda" and there else None)
    notes = list(TACTICS.notes)
    if not INSTALLED:
        notes.append("Triton is not installed; pip install 'tokenspeed[gpu]'")
    operations = sorted({(kernel.family, kernel.mode) for kernel in REGISTRY.kernels()})
    return {
        "device": device.type,
        "capability": capability_of(device),
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": head_dim,
        "operations": {
            f"{family}.{mode}": _operation(family, mode, device, dtype, head_dim) for family, mode in operations
        },
        "tactics_file": str(TACTICS.file) if TACTICS.file else None,
        "tactics": TACTICS.export(),
        "notes": notes,
    }


def _operation(family: str, mode: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, Any]:
    # Logits are float32 in every model.
    kind = torch.float32 if family == "sampling" else dtype
    request = Request(family, mode, device, kind, capability_of(device), (("head_dim", head_dim),))
    kernels = REGISTRY.kernels(family, mode)
    try:
        choice = REGISTRY.choose(request, REGISTRY.overrides.wish(family, mode))
    except KernelError as error:
        return {"selected": None, "why": str(error), "solutions": [_solution(kernel, "") for kernel in kernels]}
    reasons = dict(choice.passed_over)
    return {
        "selected": choice.kernel.solution,
        "why": choice.why,
        "solutions": [_solution(kernel, reasons.get(kernel.name, "")) for kernel in kernels],
    }


def _solution(kernel: Kernel, passed_over: str) -> dict[str, Any]:
    return {
        "solution": kernel.solution,
        "priority": kernel.priority,
        "devices": list(kernel.devices),
        "passed_over": passed_over,
    }


def main(arguments: Sequence[str]) -> int:
    """Print the report, or one sentence on stderr."""
    options: Mapping[str, Any] = json.loads(arguments[0])
    kernels = dict(options["kernels"])
    if kernels.get("kernel") is not None:
        kernels["kernel"] = tuple(kernels["kernel"])
    try:
        print(json.dumps(report(ModelOptions(**options["model"]), KernelOptions(**kernels))))
    except TokenSpeedError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
