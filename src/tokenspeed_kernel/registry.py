"""Kernels by family and mode: registration, and selection by device, capability, type and traits.

The registry lives outside `tokenspeed_kernel.ops`, so that it outlasts an edit of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from tokenspeed.errors import ConfigError
from tokenspeed_kernel.cute_language import cute_why_not
from tokenspeed_kernel.launch import launch
from tokenspeed_kernel.overrides import Overrides, Wish
from tokenspeed_kernel.triton_language import why_not

Function = TypeVar("Function", bound=Callable[..., Any])
Snapshot = Mapping[str, tuple["Kernel", Mapping[str, Any]]]
Capability = tuple[int, int]
"""Compute capability of a CUDA device, such as (9, 0) for Hopper."""


class KernelError(ConfigError):
    """No registered kernel covers what was asked for."""


@dataclass(frozen=True)
class Request:
    """What a kernel is asked for. A trait is a property of the data that some kernels need to know."""

    family: str
    mode: str
    device: torch.device
    dtype: torch.dtype
    capability: Capability | None = None
    """Of a CUDA device; None elsewhere."""
    traits: tuple[tuple[str, Any], ...] = ()

    @property
    def operation(self) -> str:
        """`family.mode`."""
        return f"{self.family}.{self.mode}"

    def __str__(self) -> str:
        where = self.device.type
        if self.capability is not None:
            where = f"{where} {self.capability[0]}.{self.capability[1]}"
        traits = "".join(f", {name} {value}" for name, value in self.traits)
        return f"{where} in {_name(self.dtype)}{traits}"


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
    capability: Capability | None = None
    """Least capability of a CUDA device; None runs on any."""
    traits: Mapping[str, Collection[Any]] = field(default_factory=dict)
    """For each trait that matters to the kernel the values that it takes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return launch(self.name, self.function, *args, **kwargs)

    def covers(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the kernel runs on `device` with tensors of `dtype`, whatever the traits."""
        return device.type in self.devices and (self.dtypes is None or dtype in self.dtypes)

    def refusal(self, request: Request) -> str:
        """Why the kernel does not serve `request`, as "needs ..."; nothing if it does."""
        if request.device.type not in self.devices:
            return f"needs {' or '.join(self.devices)}"
        if self.dtypes is not None and request.dtype not in self.dtypes:
            return f"needs {' or '.join(map(_name, self.dtypes))}"
        if self.capability is not None and request.capability is not None and request.capability < self.capability:
            return f"needs capability {self.capability[0]}.{self.capability[1]}"
        given = dict(request.traits)
        for trait, values in self.traits.items():
            if given.get(trait) not in values:
                return f"needs {trait} {_span(values)}"
        return ""


@dataclass(frozen=True)
class Choice:
    """What was selected for a request, and why."""

    request: Request
    kernel: Kernel
    wish: Wish | None
    """The override that held; None leaves it to priorities."""
    passed_over: tuple[tuple[str, str], ...]
    """Names of the other solutions, each with the reason."""

    @property
    def why(self) -> str:
        """The reason in a few words."""
        if self.wish is not None:
            return self.wish.said_by
        return f"priority {self.kernel.priority}" if self.passed_over else "the only solution"


class Registry:
    """Every kernel by name."""

    def __init__(self) -> None:
        self.overrides = Overrides()
        self._kernels: dict[str, Kernel] = {}
        self._withdrawn: WeakValueDictionary[str, Kernel] = WeakValueDictionary()

    def register(self, kernel: Kernel) -> None:
        """Add a kernel; one of the same name takes over its fields and stays the object that others hold."""
        known = self._kernels.get(kernel.name) or self._withdrawn.get(kernel.name)
        if known is not None:
            vars(known).update(vars(kernel))
        # In order of name, so that one that is registered anew leaves no trace.
        self._kernels = dict(sorted({**self._kernels, kernel.name: known or kernel}.items()))

    def withdraw(self, module: str, definitions: Mapping[str, Any]) -> None:
        """Forget the kernels that these definitions of a module registered; who holds one may still call it."""
        kept = {}
        for kernel in self.kernels():
            function = kernel.function
            # Not every callable has these: a partial object has no name.
            home, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
            is_below = home == module and name.partition(".")[0] in definitions
            if is_below or any(function is value for value in definitions.values()):
                self._withdrawn[kernel.name] = kernel
            else:
                kept[kernel.name] = kernel
        self._kernels = kept

    def select(self, family: str, mode: str, device: torch.device, dtype: torch.dtype, **traits: Any) -> Kernel:
        """The kernel of highest priority that serves, among those that an override permits.

        Between equals the first name is taken, so that every rank takes the same.

        Raises:
            KernelError: none does.
        """
        request = Request(family, mode, device, dtype, capability_of(device), tuple(sorted(traits.items())))
        return self.choose(request, self.overrides.wish(family, mode)).kernel

    def choose(self, request: Request, wish: Wish | None) -> Choice:
        """What `select` takes, and why.

        Raises:
            KernelError: no kernel serves.
        """
        kernels = self.kernels(request.family, request.mode)
        refusals = {kernel.name: kernel.refusal(request) for kernel in kernels}
        if wish is not None:
            others = f"is not what {wish.said_by} says"
            refusals |= {kernel.name: others for kernel in kernels if kernel.solution not in wish.solutions}
        serving = sorted(
            (k for k in kernels if not refusals[k.name]), key=lambda kernel: (-kernel.priority, kernel.name)
        )
        if not serving:
            raise KernelError(self._nothing_serves(request, wish))
        chosen = min(serving, key=lambda kernel: (-kernel.priority, kernel.name))
        passed = {kernel.name: f"has priority {kernel.priority}" for kernel in serving if kernel is not chosen}
        passed |= {name: reason for name, reason in refusals.items() if reason}
        return Choice(request, chosen, wish, tuple(sorted(passed.items())))

    def permit(self, assignments: Sequence[str]) -> None:
        """Take `family.mode=solution` assignments as the flag --kernel gives them.

        Raises:
            KernelError: one names what is not registered.
        """
        for assignment in assignments:
            operation, _, solution = assignment.partition("=")
            family, _, mode = operation.partition(".")
            known = [kernel.solution for kernel in self.kernels(family, mode)]
            if not known:
                raise KernelError(
                    f"--kernel {assignment} names no operation; see `ts kernels` for those that there are"
                )
            if solution not in known:
                why = _why_not(solution)
                hint = f"; {why}" if why else ""
                raise KernelError(f"--kernel {assignment} names no solution; give one of {', '.join(known)}{hint}")
            self.overrides.set_flags({operation: (solution,)}, f"--kernel {assignment}")

    def _nothing_serves(self, request: Request, wish: Wish | None) -> str:
        kernels = self.kernels(request.family, request.mode)
        if wish is not None:
            kernels = [kernel for kernel in kernels if kernel.solution in wish.solutions]
        reasons = ", ".join(f"{kernel.name} {kernel.refusal(request)}" for kernel in kernels) or "none is registered"
        if wish is not None and len(wish.solutions) == 1:
            reasons = _why_not(wish.solutions[0]) or reasons
        advice = "choose another --dtype or --device" if wish is None else f"drop {wish.said_by}"
        return f"no kernel for {request.operation} runs on {request} ({reasons}); {advice}"

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
    capability: Capability | None = None,
    traits: Mapping[str, Collection[Any]] | None = None,
) -> Callable[[Function], Function]:
    """Register the decorated function, which stays as it is, under the name `family.mode.solution`.

    Args:
        family: such as "norm".
        mode: such as "rms_norm".
        solution: such as "triton".
        priority: the highest that serves is taken.
        devices: types of device that it runs on.
        dtypes: types that it takes; None takes all.
        capability: least compute capability of a CUDA device.
        traits: for each trait that matters the values that it takes; a request that does not tell it is refused.
    """

    def register(function: Function) -> Function:
        name = f"{family}.{mode}.{solution}"
        kernel = Kernel(
            name, function, family, mode, solution, priority, devices, dtypes, capability, dict(traits or {})
        )
        REGISTRY.register(kernel)
        return function

    return register


def select(family: str, mode: str, device: torch.device, dtype: torch.dtype, **traits: Any) -> Kernel:
    """`Registry.select` on the registry of this process."""
    return REGISTRY.select(family, mode, device, dtype, **traits)


def capability_of(device: torch.device) -> Capability | None:
    """Compute capability of a CUDA device that is there; None elsewhere."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def _why_not(solution: str) -> str:
    """Why no solution of this name is registered here, or nothing."""
    return {"triton": why_not(), "gluon": why_not(), "cute": cute_why_not()}.get(solution, "")


def _span(values: Collection[Any]) -> str:
    return f"{values[0]} to {values[-1]}" if isinstance(values, range) else " or ".join(map(str, values))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
