"""NVTX ranges, for a profiler that shows what the host was doing: steps, phases, layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING = nullcontext()


class Ranges:
    """Opens ranges if `enabled`; otherwise costs one call."""

    def __init__(self, enabled: bool):
        self.enabled = enabled

    def __call__(self, name: str) -> AbstractContextManager[object]:
        """The context of one range."""
        return torch.cuda.nvtx.range(name) if self.enabled else _NOTHING

    def around_layers(self, model: torch.nn.Module) -> None:
        """Let every layer of a module list open a range while it runs: in eager steps and in captures."""
        if not self.enabled:
            return
        for path, module in model.named_modules():
            if path.rpartition(".")[2].isdigit():
                module.register_forward_pre_hook(_opening(path))
                module.register_forward_hook(_close, always_call=True)


def _opening(name: str) -> Callable[[torch.nn.Module, object], None]:
    def open_range(module: torch.nn.Module, inputs: object) -> None:
        torch.cuda.nvtx.range_push(name)

    return open_range


def _close(module: torch.nn.Module, inputs: object, output: object) -> None:
    torch.cuda.nvtx.range_pop()
