"""What plans gave to the layers of a model: made anew in a reload, put back by its undo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tokenspeed.runtime.execution.executor import Executor
from tokenspeed_kernel.ops.attention.backends import backend_of, order_of
from tokenspeed_kernel.overrides import Wishes
from tokenspeed_kernel.registry import Kernel

State = list[tuple[nn.Module, dict[str, Any], dict[str, dict[str, Any]]]]
"""Each module with its attributes, and with what its registered tensors and modules are."""

ANOTHER_ORDER = "It wants another layout of the KV cache than there is; the attention that ran before runs on."
ANOTHER_BACKEND = (
    "It is of another attention backend than the server was started with; the one that ran before runs on."
)
_REGISTERED = ("_parameters", "_buffers", "_modules")


class Plans:
    """Takes part in reloads for the layers of `executor`, whose attributes a plan sets.

    `wishes` for kernels are those of the start: flags, environment and contexts may be others by now.
    """

    def __init__(self, executor: Executor, wishes: Wishes):
        self.executor = executor
        self.wishes = wishes
        self._before: State = []

    def snapshot(self) -> tuple[State, Any]:
        """The attributes of all modules, and the kernel that samples."""
        state = [
            (module, dict(vars(module)), {name: dict(vars(module)[name]) for name in _REGISTERED})
            for module in self.executor.model.modules()
        ]
        self._before = state
        return state, self.executor.sample_kernel

    def restore(self, state: tuple[State, Any]) -> None:
        """Return to a snapshot."""
        self._before = []  # what plans have just made is not to be held
        modules, self.executor.sample_kernel = state
        for module, attributes, registered in modules:
            vars(module).clear()
            vars(module).update(attributes)
            for name, held in registered.items():
                attributes[name].clear()
                attributes[name].update(held)

    def withdraw(self, module: str, definitions: Mapping[str, Any]) -> None:
        """Nothing: a plan registers nothing."""

    def make_anew(self) -> dict[str, str]:
        """Run all plans. What they give as before stays the very object, whose address graphs may hold.

        Returns:
            The solutions of attention that were chosen and not taken, each with the reason: the ones before stay.

        Raises:
            Exception: whatever an edited plan raises; a snapshot of before is to be restored.
        """
        with self.wishes.resumed():
            self.executor.plan_again()
        refused = self._keep_attention()
        for module, before, _ in self._before:
            attributes = vars(module)
            for name, old in before.items():
                if name in attributes and _is_equal(old, attributes[name]):
                    attributes[name] = old
        self._before = []
        return refused

    def _keep_attention(self) -> dict[str, str]:
        order = self.executor.pool.shape.order
        refused = {}
        for module, before, _ in self._before:
            for name, kernel in vars(module).items():
                if isinstance(kernel, Kernel) and kernel.family == "attention":
                    why = _why_not(kernel, before[name], order)
                    if why:
                        refused[kernel.name] = why
                        vars(module)[name] = before[name]
        return dict(sorted(refused.items()))


def _why_not(kernel: Kernel, before: Kernel, order: str) -> str:
    """Why attention that a new plan chose cannot take over, or nothing."""
    if order_of(kernel) != order:
        return ANOTHER_ORDER
    was, wanted = backend_of(before), backend_of(kernel)
    return ANOTHER_BACKEND if None not in (was, wanted) and was != wanted else ""


def _is_equal(old: Any, new: Any) -> bool:
    if old is new or not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        return False
    alike = (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
    return alike and torch.equal(old, new)
