"""Matrix products on an x86 CPU with weights that are kept in half precision as well, where that loses nothing.

The numbers of most checkpoints are bfloat16 or float16. Nearly all of these are numbers of float16 too: with three
bits of mantissa to spare, a bfloat16 is one down to 2**-17. A product with few rows is bound by reading the weights,
and FBGEMM reads float16 weights with float32 activations and sums in float32: half the bytes, the same result. It is
also far ahead of MKL for 2 to 16 rows. Weights that float16 cannot hold exactly are multiplied as they are.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel.registry import register_kernel

_PACKED_CACHE: dict[int, Packed] = {}
"""By the id of the weight. An entry goes with its weight; see `Packed.holds`."""

FEW_ROWS, MANY_OUTPUTS = 8, 2048
"""Up to so many rows and from so many outputs on, MKL is faster at the transposed product."""


class Packed:
    """A weight in FBGEMM's form, if float16 can hold it."""

    def __init__(self, weight: Tensor, matrix: Any | None) -> None:
        self.weight = weakref.ref(weight)
        self.written = weight._version
        self.place = weight.data_ptr()
        self.matrix = matrix

    def holds(self, weight: Tensor) -> bool:
        """Whether this is still what `weight` says: an id may be used again, and a weight may be written."""
        return self.weight() is weight and self.written == weight._version and self.place == weight.data_ptr()


@register_kernel("gemm", "linear", solution="packed_half", priority=4, devices=("cpu",), dtypes=(torch.float32,))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    matrix = packed(weight)
    if matrix is not None:
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, matrix)
    elif 1 < x.shape[0] <= FEW_ROWS and weight.shape[0] >= MANY_OUTPUTS:
        out = (weight @ x.t()).t().contiguous()
    else:
        return torch.nn.functional.linear(x, weight, bias)
    return out if bias is None else out.add_(bias)


def packed(weight: Tensor) -> Any | None:
    """The weight in FBGEMM's form, made at the first call; None where it cannot be had without a loss."""
    if weight.is_inference():
        return None  # nothing would tell that it was written
    known = _PACKED_CACHE.get(id(weight))
    if known is None or not known.holds(weight):
        known = _PACKED_CACHE[id(weight)] = Packed(weight, pack(weight.detach()))
        weakref.finalize(weight, _PACKED_CACHE.pop, id(weight), None)
    return known.matrix


def pack(weight: Tensor) -> Any | None:
    """`weight`, float32 [out_size, in_size], in FBGEMM's form; None where float16 does not hold it exactly."""
    exact = "fbgemm" in torch.backends.quantized.supported_engines and bool((weight.half().float() == weight).all())
    return torch.ops.quantized.linear_prepack_fp16(weight, None) if exact else None
