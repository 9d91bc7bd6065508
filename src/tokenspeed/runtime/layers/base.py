"""What every layer is: storage with a plan, and slots that tell what of a checkpoint it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from tokenspeed.errors import ConfigError


@dataclass(frozen=True)
class WeightSlot:
    """One checkpoint tensor, or this rank's part of it, and its place in a parameter."""

    source: str
    """Name of the checkpoint's module; "" for the layer's own name. A merged layer has several sources."""
    parameter: str
    shape: tuple[int, ...]
    """Of the whole tensor in the checkpoint."""
    dim: int = 0
    start: int = 0
    """First index of this rank's part along `dim`."""
    length: int | None = None
    """Indices of this rank's part; None is all."""
    offset: int = 0
    """Where the part begins in the parameter along `dim`."""


class StoredWeight(Protocol):
    """A checkpoint tensor of which one part can be had without the rest; a tensor is one itself."""

    @property
    def shape(self) -> Sequence[int]:
        """Of the whole tensor."""

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Indices `start` to `start + length` along `dim`."""


class Layer(nn.Module):
    """A module that holds weights or kernels. Building it only stores; the weights start on meta."""

    fixed_types: tuple[str, ...] = ()
    """Parameters that keep the type of the checkpoint, whatever type the model computes in."""

    def plan(self, device: torch.device, dtype: torch.dtype) -> None:
        """Choose kernels and build tables for `device` and `dtype`; may run again."""

    def slots(self) -> Iterator[WeightSlot]:
        """The checkpoint tensors that fill this layer's parameters; by default each fills one whole."""
        for name, parameter in self.named_parameters(recurse=False):
            yield WeightSlot("", name, tuple(parameter.shape))

    def load(self, slot: WeightSlot, weight: StoredWeight) -> None:
        """Copy this rank's part of a checkpoint tensor of `slot.shape` to its place, converting the type."""
        length = weight.shape[slot.dim] if slot.length is None else slot.length
        place = self.get_parameter(slot.parameter).narrow(slot.dim, slot.offset, length)
        place.copy_(weight.narrow(slot.dim, slot.start, length))

    def process(self) -> None:
        """Bring loaded weights into the form that the kernels want: once after loading, not at a reload.

        A rank that replaces a lost one may find its weights in memory, as that one processed them, and processes them
        again. So this makes new tensors of the parameters, or changes nothing in them at the second time.
        """


def empty_parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter that takes no memory yet."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def divide(total: int, parts: int, what: str) -> int:
    """`total / parts`.

    Raises:
        ConfigError: it leaves a rest.
    """
    if total % parts:
        sizes = ", ".join(str(size) for size in range(1, total + 1) if total % size == 0 and size <= 64)
        raise ConfigError(f"--tensor-parallel-size {parts} does not divide {total} {what}; use one of {sizes}")
    return total // parts
