"""Which device a rank gets, and what is said where there is none."""

from __future__ import annotations

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
    assert missing_parts(CPU) == []
