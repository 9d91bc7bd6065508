"""What the flags of kernels do to a start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tokenspeed.runtime.config import KernelOptions
from tokenspeed.runtime.engine.kernels import apply_flags
from tokenspeed_kernel.cute_language import HAS_CUTE
from tokenspeed_kernel.ops.attention import plan_decode_attention
from tokenspeed_kernel.ops.norm import plan_rms_norm
from tokenspeed_kernel.registry import REGISTRY, KernelError
from tokenspeed_kernel.triton_language import AVAILABLE, HAS_GLUON

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    yield
    apply_flags(KernelOptions())


def decode() -> str:
    return plan_decode_attention(CPU, torch.float32, 64).solution


def test_without_flags_priorities_decide() -> None:
    apply_flags(KernelOptions())
    assert decode() == "trimmed"


def test_a_backend_permits_its_own_solutions_and_the_best_of_them_is_taken() -> None:
    apply_flags(KernelOptions(attention_backend="torch"))
    assert decode() == "trimmed"
    (flag,) = {wish.said_by for wish in REGISTRY.overrides.flags.values()}
    assert flag == "--attention-backend torch"


def test_one_solution_is_more_exact_than_a_backend() -> None:
    apply_flags(KernelOptions(attention_backend="torch", kernel=("attention.decode=reference",)))
    assert decode() == "reference"
    apply_flags(KernelOptions())
    assert decode() == "trimmed"


@pytest.mark.skipif(AVAILABLE, reason="Triton's solutions are registered here")
def test_a_backend_that_is_not_there_is_one_sentence() -> None:
    apply_flags(KernelOptions(attention_backend="triton"))
    with pytest.raises(KernelError, match=r"attention.decode runs on cpu .*; drop --attention-backend triton$"):
        decode()


@pytest.mark.parametrize(
    ("kernel", "is_there", "why"),
    [
        ("activation.silu_and_mul=gluon", HAS_GLUON, "Triton"),
        ("norm.rms_norm=cute", HAS_CUTE, "CuTe DSL is not installed|this torch is built without CUDA"),
    ],
)
def test_a_language_that_is_not_there_is_told(kernel: str, is_there: bool, why: str) -> None:
    if is_there:
        apply_flags(KernelOptions(kernel=(kernel,)))
        return
    with pytest.raises(KernelError, match=f"names no solution; give one of reference.*; .*({why})"):
        apply_flags(KernelOptions(kernel=(kernel,)))


def test_an_unknown_kernel_is_refused_before_anything_is_planned() -> None:
    with pytest.raises(KernelError, match=r"--kernel norm.rms_norm=quick names no solution; give one of reference"):
        apply_flags(KernelOptions(kernel=("norm.rms_norm=quick",)))
    apply_flags(KernelOptions())
    assert plan_rms_norm(CPU, torch.float32).solution == "reference"
