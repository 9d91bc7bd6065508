"""Products against float64, with dense and with block-scaled weights."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tokenspeed_kernel.ops.solutions import DEVICE, DTYPES, each, few, near, own_product, random
from tokenspeed_kernel.ops.gemm import block_fp8_linear, linear
from tokenspeed_kernel.ops.gemm.block_fp8 import DTYPE, dequantise, process
from tokenspeed_kernel.registry import Kernel

ROWS = st.sampled_from([0, 1, 2, 9, 16, 33, 70])


@each("gemm", "linear")
@few(30)
@given(
    rows=ROWS,
    in_size=st.sampled_from([1, 9, 128, 300, 520]),
    out_size=st.sampled_from([1, 7, 16, 100]),
    has_bias=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_linear(
    kernel: Kernel, rows: int, in_size: int, out_size: int, has_bias: bool, dtype: torch.dtype, seed: int
) -> None:
    if not kernel.covers(DEVICE, dtype):
        return
    x = random(seed, rows, 2 * in_size, dtype=dtype)[:, :in_size]
    weight = random(seed + 1, out_size, in_size, dtype=dtype) * in_size**-0.5
    bias = random(seed + 2, out_size, dtype=dtype) if has_bias else None
    with own_product(kernel):
        got = linear(x, weight, bias, kernel=kernel)
    assert got.dtype == dtype
    near(got, x.double() @ weight.double().T + (0 if bias is None else bias.double()))


@each("gemm", "block_fp8_linear")
@few(30)
@given(
    rows=ROWS,
    in_size=st.sampled_from([1, 100, 128, 300]),
    out_size=st.sampled_from([1, 100, 128, 200]),
    has_bias=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_block_fp8_linear(
    kernel: Kernel, rows: int, in_size: int, out_size: int, has_bias: bool, dtype: torch.dtype, seed: int
) -> None:
    x = random(seed, rows, in_size, dtype=dtype)
    weight = random(seed + 1, out_size, in_size).to(DTYPE)
    scales = random(seed + 2, -(-out_size // 128), -(-in_size // 128)).exp() * in_size**-0.5
    bias = random(seed + 3, out_size, dtype=dtype) if has_bias else None
    exact = torch.empty(out_size, in_size, dtype=torch.float64, device=DEVICE)
    for i in range(out_size):
        for j in range(0, in_size, 128):
            exact[i, j : j + 128] = weight[i, j : j + 128].double() * scales[i // 128, j // 128].double()
    processed = process(weight, scales)
    torch.testing.assert_close(dequantise(*processed)[:out_size, :in_size].double(), exact)
    got = block_fp8_linear(x, *processed, bias, out_size, kernel=kernel)
    assert (got.shape, got.dtype) == ((rows, out_size), dtype)
    want = x.double() @ exact.T + (0 if bias is None else bias.double())
    rough = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    torch.testing.assert_close(
        got.double(), want, rtol=rough, atol=rough * want.abs().max().clamp(min=1).item() if rows else rough
    )
