"""Linear layers, spread over the ranks of a tensor-parallel group by columns (outputs) or rows (inputs)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokenspeed.errors import ConfigError
from tokenspeed.runtime.layers.base import Layer, WeightSlot, divide, empty_parameter
from tokenspeed_kernel.ops.gemm import block_fp8 as form
from tokenspeed_kernel.ops.gemm import block_fp8_linear, linear, plan_block_fp8_linear, plan_linear

if TYPE_CHECKING:
    from tokenspeed.runtime.distributed.group import Group


class Linear(Layer):
    """Root of the linear layers: this rank's part of a weight, [out_size, in_size], and of a bias.

    With `block_fp8` the weight is float8 with a scale for each block, as `tokenspeed_kernel.ops.gemm` has it.
    """

    def __init__(self, in_size: int, out_size: int, bias: bool, block_fp8: bool = False) -> None:
        super().__init__()
        self.out_size = out_size
        self.block_fp8 = block_fp8
        if block_fp8:
            self.fixed_types = ("weight", "weight_scale_inv")
            self.weight = empty_parameter(out_size, in_size, dtype=form.DTYPE)
            self.weight_scale_inv = empty_parameter(form.blocks(out_size), form.blocks(in_size))
        else:
            self.weight = empty_parameter(out_size, in_size)
        self.bias = empty_parameter(out_size) if bias else None

    def plan(self, device: torch.device, dtype: torch.dtype) -> None:
        self.kernel = plan_block_fp8_linear(device, dtype) if self.block_fp8 else plan_linear(device, dtype)

    def process(self) -> None:
        if self.block_fp8:
            self.packed = form.process(self.weight.data, self.weight_scale_inv.data)

    def output_slots(self, source: str, size: int, start: int, length: int, offset: int) -> Iterator[WeightSlot]:
        """Outputs `start` to `start + length` of `size` in the checkpoint, held here from `offset` on."""
        in_size = self.weight.shape[1]
        yield WeightSlot(source, "weight", (size, in_size), 0, start, length, offset)
        if self.block_fp8:
            self._check_blocks(source, start, offset, length, is_last=offset + length == self.out_size)
            whole = form.blocks(size), form.blocks(in_size)
            parts = start // form.BLOCK, form.blocks(length), offset // form.BLOCK
            yield WeightSlot(source, "weight_scale_inv", whole, 0, *parts)
        if self.bias is not None:
            yield WeightSlot(source, "bias", (size,), 0, start, length, offset)

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`: [tokens, in_size] to [tokens, out_size] of this rank's part."""
        if self.block_fp8:
            return block_fp8_linear(x, *self.packed, bias, self.out_size, kernel=self.kernel)
        return linear(x, self.weight, bias, kernel=self.kernel)

    def _check_blocks(self, source: str, start: int, offset: int, length: int, is_last: bool) -> None:
        """Refuse to cut a block of float8 weights, whose scale only holds for the whole of it."""
        if start % form.BLOCK or offset % form.BLOCK or (length % form.BLOCK and not is_last):
            raise ConfigError(
                f"the float8 weights of {source or 'a linear layer'} cannot be spread so: {length} of them on a rank "
                f"are no whole blocks of {form.BLOCK}; lower --tensor-parallel-size or use an unquantised checkpoint"
            )


class ColumnParallelLinear(Linear):
    """Every rank computes an equal part of each output.

    Several outputs that share the input may be merged: `sources` then names their modules in the checkpoint.
    """

    def __init__(
        self,
        in_size: int,
        out_sizes: Sequence[int],
        bias: bool,
        group: Group,
        sources: Sequence[str] = ("",),
        block_fp8: bool = False,
    ) -> None:
        local_sizes = tuple(divide(size, group.size, "outputs of a linear layer") for size in out_sizes)
        super().__init__(in_size, sum(local_sizes), bias, block_fp8)
        self.sources = tuple(sources)
        self.out_sizes = tuple(out_sizes)
        self.local_sizes = local_sizes
        self.rank = group.rank

    def slots(self) -> Iterator[WeightSlot]:
        offset = 0
        for source, size, local in zip(self.sources, self.out_sizes, self.local_sizes, strict=True):
            yield from self.output_slots(source, size, self.rank * local, local, offset)
            offset += local

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, in_size] to [tokens, sum of out_sizes / ranks], output by output."""
        return self.project(x, self.bias)


class QKVParallelLinear(Linear):
    """The query, key and value projections of attention in one product.

    Ranks share the heads equally; where ranks outnumber the KV heads, each KV head lives on several ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        group: Group,
        block_fp8: bool = False,
    ) -> None:
        copies = group.size // num_kv_heads if group.size % num_kv_heads == 0 else 1
        local_heads = divide(num_heads, group.size, "attention heads")
        local_kv_heads = divide(num_kv_heads * copies, group.size, "KV heads")
        super().__init__(hidden_size, (local_heads + 2 * local_kv_heads) * head_dim, bias, block_fp8)
        self.head_dim = head_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.local_heads = (local_heads, local_kv_heads, local_kv_heads)
        self.rank = group.rank
        self.kv_rank = group.rank // copies

    def slots(self) -> Iterator[WeightSlot]:
        query, key, value = (heads * self.head_dim for heads in self.local_heads)
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield from self.output_slots("q_proj", query_size, self.rank * query, query, 0)
        yield from self.output_slots("k_proj", kv_size, self.kv_rank * key, key, query)
        yield from self.output_slots("v_proj", kv_size, self.kv_rank * value, value, query + key)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens, hidden_size] to this rank's query, key and value, each [tokens, local heads, head_dim]."""
        heads = self.project(x, self.bias).unflatten(-1, (-1, self.head_dim))
        query, key, value = heads.split(self.local_heads, dim=1)
        return query, key, value


class RowParallelLinear(Linear):
    """Every rank holds an equal part of the inputs; the partial results are summed over the group."""

    def __init__(self, in_size: int, out_size: int, bias: bool, group: Group, block_fp8: bool = False) -> None:
        super().__init__(divide(in_size, group.size, "inputs of a linear layer"), out_size, bias, block_fp8)
        self.in_size = in_size
        self.group = group

    def slots(self) -> Iterator[WeightSlot]:
        out_size, local = self.weight.shape
        start = self.group.rank * local
        yield WeightSlot("", "weight", (out_size, self.in_size), 1, start, local)
        if self.block_fp8:
            self._check_blocks("", start, 0, local, is_last=self.group.size == 1)
            whole = form.blocks(out_size), form.blocks(self.in_size)
            yield WeightSlot("", "weight_scale_inv", whole, 1, start // form.BLOCK, form.blocks(local))
        if self.bias is not None:
            yield WeightSlot("", "bias", (out_size,))

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, in_size / ranks] to [tokens, out_size], the same on all ranks."""
        return self.group.all_reduce(self.project(x, self.bias if self.group.rank == 0 else None))
