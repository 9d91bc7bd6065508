"""How both Triton products end: the bias is added, and what is inside is written."""

from __future__ import annotations

from tokenspeed_kernel.triton_language import tl, triton


@triton.jit
def store_product(total, bias, out, row, rows, output, out_size, HAS_BIAS: tl.constexpr):
    """Write float32 sums [row, output], rounded, to `out` [rows, out_size]."""
    if HAS_BIAS:
        total += tl.load(bias + output, mask=output < out_size, other=0.0).to(tl.float32)[None, :]
    mask = (row[:, None] < rows) & (output[None, :] < out_size)
    tl.store(out + row[:, None] * out_size + output[None, :], total.to(out.dtype.element_ty), mask=mask)
