"""Normalisation in CuTe DSL: one block a row. Importing this file takes seconds, as the DSL does."""

from __future__ import annotations

from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import cute

from tokenspeed_kernel.cute_run import STREAM, compile_cute, pointer

THREADS = 256
WARP = 32
_COMPILED_CACHE: dict[tuple[str, str, bool], Any] = {}


def compiled(dtype: str, weight_dtype: str, has_residual: bool) -> Any:
    """`launch_rms_norm` for types of torch; sizes, strides, addresses and the stream are arguments."""
    key = dtype, weight_dtype, has_residual
    function = _COMPILED_CACHE.get(key)
    if function is None:
        value, weight = pointer(dtype), pointer(weight_dtype)
        numbers = 1, 1, 1, 1, 0.0
        function = compile_cute(launch_rms_norm, value, value, weight, value, value, *numbers, STREAM, has_residual)
        _COMPILED_CACHE[key] = function
    return function


@cute.jit
def launch_rms_norm(
    x: cute.Pointer,
    residual: cute.Pointer,
    weight: cute.Pointer,
    out: cute.Pointer,
    total: cute.Pointer,
    rows: cutlass.Int32,
    size: cutlass.Int32,
    x_stride: cutlass.Int64,
    residual_stride: cutlass.Int64,
    eps: cutlass.Float32,
    stream: CUstream,
    has_residual: cutlass.Constexpr,
):
    rms_norm_kernel(
        cute.make_tensor(x, cute.make_layout((rows, size), stride=(x_stride, 1))),
        cute.make_tensor(residual, cute.make_layout((rows, size), stride=(residual_stride, 1))),
        cute.make_tensor(weight, cute.make_layout(size)),
        cute.make_tensor(out, cute.make_layout((rows, size), stride=(cutlass.Int64(size), 1))),
        cute.make_tensor(total, cute.make_layout((rows, size), stride=(cutlass.Int64(size), 1))),
        size,
        eps,
        has_residual,
    ).launch(grid=(rows, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def rms_norm_kernel(
    x: cute.Tensor,
    residual: cute.Tensor,
    weight: cute.Tensor,
    out: cute.Tensor,
    total: cute.Tensor,
    size: cutlass.Int32,
    eps: cutlass.Float32,
    has_residual: cutlass.Constexpr,
):
    row, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    dtype = out.element_type
    squares = cutlass.Float32(0.0)
    for column in cutlass.range(thread, size, THREADS):
        wide = x[row, column].to(cutlass.Float32)
        if cutlass.const_expr(has_residual):
            added = (wide + residual[row, column].to(cutlass.Float32)).to(dtype)
            total[row, column] = added
            wide = added.to(cutlass.Float32)
        squares += wide * wide
    scale = cute.math.rsqrt(sum_of_block(squares) / size + eps)
    for column in cutlass.range(thread, size, THREADS):
        # A thread reads what it has written itself.
        value = total[row, column] if cutlass.const_expr(has_residual) else x[row, column]
        # Rounded before the weight is applied, as the reference does.
        normal = (value.to(cutlass.Float32) * scale).to(dtype).to(cutlass.Float32)
        out[row, column] = (normal * weight[column].to(cutlass.Float32)).to(dtype)


@cute.jit
def sum_of_block(number: cutlass.Float32) -> cutlass.Float32:
    """The sum over all threads of a block, in every one of them."""
    shared = cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, THREADS // WARP), cute.make_layout(THREADS // WARP))
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    of_warp = cute.arch.warp_reduction_sum(number)
    if lane == 0:
        shared[warp] = of_warp
    cute.arch.sync_threads()
    whole = cutlass.Float32(0.0)
    for index in cutlass.range_constexpr(THREADS // WARP):
        whole += shared[index]
    return whole
