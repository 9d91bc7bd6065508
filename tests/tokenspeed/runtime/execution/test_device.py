"""Which device a rank gets, and what is said where there is none."""

from __future__ import annotations

import importlib.util
import re
import warnings
from typing import Any

import pytest
import torch

from tokenspeed.errors import ResourceError
from tokenspeed.runtime.execution.device import cuda_problem, missing_parts, pick_device, pick_dtype

CPU = torch.device("cpu")


def test_auto_and_cuda_where_torch_has_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert pick_device("auto", 0, 2) == CPU
    assert pick_device("cpu", 1, 2) == CPU
    with pytest.raises(ResourceError, match=r"cannot be used: this torch is built without CUDA; install a CUDA build"):
        pick_device("cuda", 0, 1)


def test_an_old_driver_and_no_device_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch says of them, as CUDA builds of it do."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def old() -> bool:
        warnings.warn(
            "CUDA initialization: The NVIDIA driver on your system is too old (found version 12020).", stacklevel=1
        )
        return False

    monkeypatch.setattr(torch.cuda, "is_available", old)
    with pytest.raises(ResourceError, match=r"driver is older than CUDA 13.0 needs; update the driver, or use"):
        pick_device("cuda", 0, 1)
    assert pick_device("auto", 0, 1) == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_problem() == "torch finds no CUDA device; check nvidia-smi and CUDA_VISIBLE_DEVICES"


def test_ranks_need_as_many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert pick_device("auto", 1, 2) == torch.device("cuda", 1) == chosen[0]
    with pytest.raises(ResourceError, match="--tensor-parallel-size 4 needs as many GPUs and this machine shows 2"):
        pick_device("cuda", 0, 4)


def test_a_gpu_without_bfloat16_asks_for_another_type(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert pick_dtype("float16", "bfloat16", gpu) == torch.float16
    with pytest.raises(ResourceError, match="Tesla T4 has no bfloat16; give --dtype float16"):
        pick_dtype("auto", "bfloat16", gpu)


def test_a_cpu_computes_in_float32_unless_told_and_lacks_nothing() -> None:
    assert pick_dtype("auto", "bfloat16", CPU) == torch.float32
    assert pick_dtype("bfloat16", "float32", CPU) == torch.bfloat16
    assert missing_parts(CPU, "cpu") == []


ARCHES = ["sm_75", "sm_80", "sm_90", "sm_90a", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "runs"),
    [((7, 0), False), ((7, 5), True), ((8, 9), True), ((10, 0), False), ((13, 1), True)],
)
def test_a_gpu_that_this_torch_has_no_code_for_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], runs: bool
) -> None:
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "get_arch_list": lambda: ARCHES,
        "get_device_name": lambda device: "Some GPU",
        "get_device_capability": lambda device: capability,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for asked in ("auto", "cuda"):
        if runs:
            assert pick_device(asked, 0, 1) == torch.device("cuda", 0)
        else:
            has = f"{capability[0]}.{capability[1]}, and this torch is built for 7.5 to 12.0; install"
            with pytest.raises(ResourceError, match=re.escape(f"Some GPU has compute capability {has}")):
                pick_device(asked, 0, 1)


def test_what_makes_a_gpu_slow_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, capability = torch.device("cuda", 0), [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (sentence,) = missing_parts(gpu, "auto")
    assert sentence.startswith("Triton is not installed: all kernels are plain torch")
    capability[0] = (7, 5)
    (sentence,) = missing_parts(gpu, "auto")
    assert sentence.startswith("Tesla T4 has no compute capability 8.0, which Triton needs")


def test_a_gpu_that_is_not_used_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert missing_parts(CPU, "cpu") == []
    (sentence,) = missing_parts(CPU, "auto")
    assert (
        sentence == "the model runs on the CPU: torch finds no CUDA device; check nvidia-smi and CUDA_VISIBLE_DEVICES"
    )
