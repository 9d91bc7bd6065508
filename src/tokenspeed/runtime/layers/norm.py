"""Root mean square normalisation."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from tokenspeed.runtime.layers.base import Layer, empty_parameter
from tokenspeed_kernel.ops.norm import add_rms_norm, plan_add_rms_norm, plan_rms_norm, rms_norm


class RMSNorm(Layer):
    """Normalises the last dimension, of `size`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps

    def plan(self, device: torch.device, dtype: torch.dtype) -> None:
        self.kernel = plan_rms_norm(device, dtype)
        self.add_kernel = plan_add_rms_norm(device, dtype)

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of x, [..., size]; with a residual of x's shape, the norm of `x + residual` and that sum."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps, kernel=self.kernel)
        return add_rms_norm(x, residual, self.weight, self.eps, kernel=self.add_kernel)
