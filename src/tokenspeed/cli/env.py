"""`ts env`: what a bug report needs to say about the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version

from tokenspeed import __version__

TORCH_QUESTIONS = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__,
    "CUDA of torch": torch.version.cuda or "none",
    "CUDA available": "yes" if cuda else "no",
    "GPUs": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if cuda else [],
    "torch threads": torch.get_num_threads(),
}))
"""
"""Asked in a process of its own, so that a broken torch cannot break this command."""

EXTRA_PACKAGES = ("triton", "cuda-bindings", "xgrammar")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(namespace: argparse.Namespace) -> int:
    """Print one fact a line."""
    facts = {**_machine(), **_torch(), **_gpu_driver(), **_packages()}
    if namespace.json:
        print(json.dumps(facts, indent=2))
        return 0
    width = max(map(len, facts))
    for name, value in facts.items():
        text = ", ".join(map(str, value)) or "none" if isinstance(value, list) else value
        print(f"{name:<{width}}  {text}")
    return 0


def _machine() -> dict[str, object]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "CPUs": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "ulimit open files": f"{_limit(soft)} (hard {_limit(hard)})",
        "ulimit locked memory": _limit(locked),
    }


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _torch() -> dict[str, object]:
    answer = _output_of([sys.executable, "-c", TORCH_QUESTIONS])
    facts: dict[str, object] = json.loads(answer) if answer else {"torch": "cannot be imported"}
    return facts


def _gpu_driver() -> dict[str, object]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    compiler = [line for line in _output_of(["nvcc", "--version"]).splitlines() if "release" in line]
    return {
        "NVIDIA driver": next(iter(_output_of(query).splitlines()), "none"),
        "nvcc": compiler[0].rpartition("release ")[2] if compiler else "none",
    }


def _packages() -> dict[str, object]:
    try:
        needed = [line.partition(";")[0] for line in requires("tokenspeed") or [] if "extra ==" not in line]
    except PackageNotFoundError:  # it runs from a directory, without an installation
        needed = []
    names = [*(_name(line) for line in needed), *EXTRA_PACKAGES]
    return {"tokenspeed": __version__, **{name: _version(name) for name in names if name != "torch"}}


def _name(requirement: str) -> str:
    return requirement.strip().partition(">")[0].partition("=")[0].partition("<")[0].partition("[")[0].strip()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _output_of(command: list[str]) -> str:
    """What the command printed, or nothing when it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
