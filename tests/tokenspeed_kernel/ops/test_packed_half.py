"""Packed weights are the weights, and follow them."""

from __future__ import annotations

import gc

import pytest
import torch

from tokenspeed_kernel.ops.gemm import linear, packed_half, plan_linear

HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
CPU = torch.device("cpu")
SHAPES = [(0, 16, 8), (1, 48, 40), (2, 2304, 65), (5, 64, 576), (8, 2304, 64), (33, 96, 24), (300, 33, 17)]
"""Rows, outputs, inputs."""


def tensors(rows: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return tuple(torch.randn(shape, generator=generator) for shape in ((rows, inputs), (outputs, inputs), (outputs,)))  # type: ignore[return-value]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("exact", [True, False])
def test_products_agree_with_float64(shape: tuple[int, int, int], exact: bool) -> None:
    wide, weight, bias = tensors(shape[0], shape[1], 2 * shape[2])
    x, weight = wide[:, : shape[2]], weight[:, : shape[2]]
    if exact:
        weight = weight.bfloat16().float()
    for given in (None, bias):
        out = packed_half.linear(x, weight, given)
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if given is None else given.double())
        assert out.dtype == torch.float32 and out.is_contiguous()
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5 * shape[2] ** 0.5)


def test_a_cpu_takes_the_packed_solution_for_float32_only() -> None:
    assert plan_linear(CPU, torch.float32).solution == "packed_half"
    assert plan_linear(CPU, torch.bfloat16).solution != "packed_half"


@pytest.mark.skipif(not HAS_FBGEMM, reason="needs FBGEMM")
def test_what_is_packed_is_the_weight_bit_for_bit() -> None:
    _, weight, _ = tensors(1, 64, 96)
    tiny = torch.tensor([2.0**-24, -(2.0**-17), 0.0, -0.0, 65504.0])
    for exact in (weight.bfloat16().float(), weight.half().float(), tiny.expand(16, 5).contiguous()):
        matrix = packed_half.pack(exact)
        assert matrix is not None
        unpacked, _ = torch.ops.quantized.linear_unpack_fp16(matrix)
        assert torch.equal(unpacked.float(), exact)


@pytest.mark.parametrize("value", [1 / 3, 2.0**-25, 65520.0, float("inf"), float("nan"), 1e30])
def test_what_float16_cannot_hold_is_not_packed(value: float) -> None:
    weight = torch.ones(32, 32)
    weight[3, 4] = value
    held = torch.tensor(value).half().float() == value
    assert (packed_half.pack(weight) is None) == (not held or not HAS_FBGEMM)
    x = torch.randn(4, 32)
    torch.testing.assert_close(
        linear(x, weight), torch.nn.functional.linear(x, weight), rtol=1e-5, atol=1e-5, equal_nan=True
    )


def test_a_weight_that_is_written_is_packed_again() -> None:
    x, weight, _ = tensors(4, 64, 64)
    weight = torch.nn.Parameter(weight.bfloat16().float(), requires_grad=False)
    before = linear(x, weight)
    weight.mul_(2)
    torch.testing.assert_close(linear(x, weight), before * 2)
    weight.copy_(torch.full_like(weight, 1 / 3))
    torch.testing.assert_close(linear(x, weight), torch.nn.functional.linear(x, weight))
    weight.data = torch.ones(64, 64)
    torch.testing.assert_close(linear(x, weight), x.sum(1, keepdim=True).expand(4, 64))


def test_a_packed_weight_goes_with_the_weight() -> None:
    before = len(packed_half._PACKED_CACHE)
    x, weight, _ = tensors(4, 64, 64)
    linear(x, weight)
    assert len(packed_half._PACKED_CACHE) == before + 1
    del weight
    gc.collect()
    assert len(packed_half._PACKED_CACHE) == before


def test_a_weight_made_in_inference_mode_is_not_kept() -> None:
    before = len(packed_half._PACKED_CACHE)
    with torch.inference_mode():
        x, weight = torch.randn(4, 32), torch.ones(16, 32)
        first = linear(x, weight)
        weight.mul_(2)
        torch.testing.assert_close(linear(x, weight), first * 2)
    assert len(packed_half._PACKED_CACHE) == before
