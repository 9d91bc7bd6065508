"""Kernels by family and mode: registration, and selection by device and type.

The registry lives outside `tokenspeed_kernel.ops`, so that it outlasts an edit of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from tokenspeed.errors import ConfigError
from tokenspeed_kernel.launch import launch

if TYPE_CHECKING:
    import torch

Function = TypeVar("Function", bound=Callable[..., Any])
Snapshot = Mapping[str, tuple["Kernel", Mapping[str, Any]]]
Request = tuple[str, str, "torch.device", "torch.dtype"]
"""Family, mode, device and type that a kernel was asked for."""


class KernelError(ConfigError):
    """No registered kernel covers what was asked for."""


# Not frozen and without slots: a later registration of the name, and a reload, exchange the fields in place,
# so that who holds a kernel runs the new function.
@dataclass(eq=False)
class Kernel:
    """One registered implementation of an operation; calling it is one launch."""

    name: str
    function: Callable[..., Any]
    family: str = ""
    mode: str = ""
    solution: str = ""
    priority: int = 0
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] | None = None
    """Types that the kernel takes; None takes every type."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return launch(self.name, self.function, *args, **kwargs)

    def covers(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the kernel runs on `device` with tensors of `dtype`."""
        return device.type in self.devices and (self.dtypes is None or dtype in self.dtypes)


class Registry:
    """Every kernel by name."""

    def __init__(self) -> None:
        self._kernels: dict[str, Kernel] = {}
        self._withdrawn: WeakValueDictionary[str, Kernel] = WeakValueDictionary()
        self._chosen: dict[Request, Kernel] = {}

    def register(self, kernel: Kernel) -> None:
        """Add a kernel; one of the same name takes over its fields and stays the object that others hold."""
        known = self._kernels.get(kernel.name) or self._withdrawn.get(kernel.name)
        if known is not None:
            vars(known).update(vars(kernel))
        self._kernels[kernel.name] = known or kernel

    def withdraw(self, module: str, definitions: Mapping[str, Any]) -> None:
        """Forget the kernels that these definitions of a module registered; who holds one may still call it."""
        for kernel in self.kernels():
            function = kernel.function
            # Not every callable has these: a partial object has no name.
            home, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
            is_below = home == module and name.partition(".")[0] in definitions
            if is_below or any(function is value for value in definitions.values()):
                self._withdrawn[kernel.name] = self._kernels.pop(kernel.name)

    def select(self, family: str, mode: str, device: torch.device, dtype: torch.dtype) -> Kernel:
        """The kernel of highest priority that covers `device` and `dtype`; between equals the first name.

        Raises:
            KernelError: none does.
        """
        kernels = [kernel for kernel in self.kernels(family, mode) if kernel.covers(device, dtype)]
        if not kernels:
            known = ", ".join(kernel.name for kernel in self.kernels(family, mode)) or "none is registered"
            raise KernelError(
                f"no kernel for {family}.{mode} runs on {device.type} in {dtype} ({known}); "
                "choose another --dtype or --device"
            )
        chosen = min(kernels, key=lambda kernel: (-kernel.priority, kernel.name))
        self._chosen.setdefault((family, mode, device, dtype), chosen)
        return chosen

    def other_choices(self) -> dict[str, tuple[str, str | None]]:
        """By family and mode: the name of the kernel that was chosen first, and of the other that would be now.

        None in its place says that no kernel would do. A kernel of another name and the same function is no other.
        """
        found: dict[str, tuple[str, str | None]] = {}
        for (family, mode, device, dtype), chosen in self._chosen.items():
            try:
                now: Kernel | None = self.select(family, mode, device, dtype)
            except KernelError:
                now = None
            if now is None or now.function is not chosen.function:
                found[f"{family}.{mode}"] = (chosen.name, now.name if now is not None else None)
        return found

    def get(self, name: str) -> Kernel:
        """The kernel called `family.mode.solution`.

        Raises:
            KernelError: it is not registered.
        """
        try:
            return self._kernels[name]
        except KeyError:
            raise KernelError(f"there is no kernel {name}; see `ts kernels` for those that there are") from None

    def kernels(self, family: str | None = None, mode: str | None = None) -> list[Kernel]:
        """Registered kernels in order of name, of one family and mode if these are given."""
        return [
            kernel
            for _, kernel in sorted(self._kernels.items())
            if family in (None, kernel.family) and mode in (None, kernel.mode)
        ]

    def snapshot(self) -> Snapshot:
        """What is registered now, for `restore`."""
        return {name: (kernel, dict(vars(kernel))) for name, kernel in self._kernels.items()}

    def restore(self, snapshot: Snapshot) -> None:
        """Undo every registration since `snapshot`: new names go, changed kernels get their fields back."""
        self._kernels = {name: kernel for name, (kernel, _) in snapshot.items()}
        for kernel, fields in snapshot.values():
            vars(kernel).update(fields)


REGISTRY = Registry()
"""The registry of this process."""


def register_kernel(
    family: str,
    mode: str,
    *,
    solution: str,
    priority: int = 0,
    devices: tuple[str, ...] = ("cpu", "cuda"),
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> Callable[[Function], Function]:
    """Register the decorated function, which stays as it is, under the name `family.mode.solution`."""

    def register(function: Function) -> Function:
        name = f"{family}.{mode}.{solution}"
        REGISTRY.register(Kernel(name, function, family, mode, solution, priority, devices, dtypes))
        return function

    return register


def select(family: str, mode: str, device: torch.device, dtype: torch.dtype) -> Kernel:
    """`Registry.select` on the registry of this process."""
    return REGISTRY.select(family, mode, device, dtype)
