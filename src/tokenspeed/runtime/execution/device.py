"""Which device a rank runs on, and what it lacks there."""

from __future__ import annotations

import importlib.util
import re
import warnings

import torch

from tokenspeed.errors import ResourceError
from tokenspeed_kernel.triton_language import CAPABILITY


def pick_device(asked: str, rank: int, ranks: int) -> torch.device:
    """The device of `rank`; auto is a GPU where torch can use one.

    Raises:
        ResourceError: the device is not there, or there are fewer GPUs than ranks.
    """
    if asked == "cpu":
        return torch.device("cpu")
    problem = cuda_problem()
    if problem is not None:
        if asked == "cuda":
            raise ResourceError(f"--device cuda cannot be used: {problem}, or use --device cpu")
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if ranks > count:
        raise ResourceError(
            f"--tensor-parallel-size {ranks} needs as many GPUs and this machine shows {count}; "
            "lower it, or check CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", rank)
    _check_build(device)
    torch.cuda.set_device(device)
    return device


def _check_build(device: torch.device) -> None:
    """Refuse a GPU for which this torch has no code: every operation would fail."""
    major, minor = torch.cuda.get_device_capability(device)
    built = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name) for name in torch.cuda.get_arch_list()]
    targets = [(found[1], int(found[2]), int(found[3])) for found in built if found is not None]
    # Machine code runs on later GPUs of its own generation; what is in PTX, on all later ones.
    if targets and not any(
        (kind == "sm" and high == major and low <= minor) or (kind == "compute" and (high, low) <= (major, minor))
        for kind, high, low in targets
    ):
        least, most = min(target[1:] for target in targets), max(target[1:] for target in targets)
        raise ResourceError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and this torch is built "
            f"for {least[0]}.{least[1]} to {most[0]}.{most[1]}; install a torch that is built for it, or use "
            "--device cpu"
        )


def cuda_problem() -> str | None:
    """Why torch has no GPU here, and what to do, as a clause; None when it has one."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA; install a CUDA build of torch"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable:
        return None
    text = " ".join(str(warning.message) for warning in told)
    if "too old" in text:
        return f"the NVIDIA driver is older than CUDA {torch.version.cuda} needs; update the driver"
    return "torch finds no CUDA device; check nvidia-smi and CUDA_VISIBLE_DEVICES"


def missing_parts(device: torch.device, asked: str) -> list[str]:
    """Why a model on `device` is slower than it could be, one sentence each.

    Args:
        device: from `pick_device`.
        asked: what that was asked for.
    """
    if device.type != "cuda":
        # A torch with CUDA was installed for a GPU.
        problem = cuda_problem() if asked == "auto" and torch.version.cuda is not None else None
        return [f"the model runs on the CPU: {problem}"] if problem else []
    lacking = []
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        lacking.append(
            f"{torch.cuda.get_device_name(device)} has no compute capability {CAPABILITY[0]}.{CAPABILITY[1]}, which "
            "Triton needs: all kernels are plain torch, which is slow"
        )
    elif importlib.util.find_spec("triton") is None:
        lacking.append("Triton is not installed: all kernels are plain torch, which is slow; install tokenspeed[gpu]")
    return lacking


def pick_dtype(asked: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """Type of weights and activations; auto is float32 on a CPU and the checkpoint's type elsewhere.

    Raises:
        ResourceError: the GPU cannot compute in this type.
    """
    name = asked if asked != "auto" else ("float32" if device.type == "cpu" else checkpoint)
    dtype: torch.dtype = getattr(torch, name)
    if device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        raise ResourceError(f"{torch.cuda.get_device_name(device)} has no bfloat16; give --dtype float16")
    return dtype
