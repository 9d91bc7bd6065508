"""Which solutions the tests of an operation run: all that run on this machine's device.

That is the GPU where there is one. With TRITON_INTERPRET=1 Triton's solutions run on the CPU, slowly.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

import tokenspeed_kernel.ops  # noqa: F401
from tokenspeed_kernel.registry import REGISTRY, Kernel
from tokenspeed_kernel.triton_language import INTERPRETED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# The interpreter rounds to bfloat16 by cutting digits off, and computes its products wrongly.
DTYPES = st.sampled_from(
    [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
)


def solutions(family: str, mode: str) -> list[Kernel]:
    """Those that run here, in order of name."""
    return [kernel for kernel in REGISTRY.kernels(family, mode) if DEVICE.type in kernel.devices]


def each(family: str, mode: str) -> pytest.MarkDecorator:
    """Run a test with every solution, as its argument `kernel`."""
    return pytest.mark.parametrize("kernel", solutions(family, mode), ids=lambda kernel: kernel.solution)


@contextmanager
def own_product(kernel: Kernel) -> Iterator[None]:
    """Let a kernel of `gemm.linear` compute the product itself, where untuned it would leave it to torch."""
    module = sys.modules[kernel.function.__module__]
    before = getattr(module, "CANDIDATES", ())
    module.__dict__["CANDIDATES"] = tuple(tactic for tactic in before if tactic["block_n"])
    try:
        yield
    finally:
        module.__dict__["CANDIDATES"] = before


def few(examples: int) -> settings:
    """So many examples, and a few only under the interpreter."""
    return settings(max_examples=min(examples, 5) if INTERPRETED else examples, deadline=None)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers on the device, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def near(got: Tensor, want: Tensor) -> None:
    """Compare with a result in float64, as closely as the type of `got` permits."""
    assert want.dtype == torch.float64
    rough = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=rough, atol=rough)
