"""The state of kernels before and after a reload, exchanged at once with the hashes that come from it."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from tokenspeed_reload.adapters.triton.alike import SELF_MADE, same_setting
from tokenspeed_reload.adapters.triton.library import Triton, is_tritons
from tokenspeed_reload.adapters.triton.reach import Reaches, key_of
from tokenspeed_reload.adapters.triton.rehash import rehash
from tokenspeed_reload.adapters.triton.window import CompileWindow
from tokenspeed_reload.heap import thawed
from tokenspeed_reload.undo import Record, replace_dict

State = tuple[type, list[tuple[str, Any]]]


class KernelStates:
    """The kernels of one reload, each with the state that is not in force.

    A kernel's hash follows from its source and that of its callees. All states are therefore exchanged in one
    go, and with them whatever was compiled from them in the meantime: kernels that were made since the reload,
    and reach one of these, start without binaries.
    """

    def __init__(self, library: Triton, reaches: Reaches, modules: Iterable[str]) -> None:
        self._library = library
        self._reaches = reaches
        self._modules = frozenset(modules)
        self._targets: dict[int, Any] = {}
        self._held: dict[int, State] = {}
        self._registry = self._registered()
        self.is_new_in_force = True

    def __contains__(self, kernel: Any) -> bool:
        return id(kernel) in self._targets

    def add(self, kernel: Any) -> None:
        """Remember the state of `kernel`; to be called before the first write."""
        if id(kernel) not in self._targets:
            self._targets[id(kernel)] = kernel
            self._held[id(kernel)] = _read(kernel)

    def containers(self) -> list[Any]:
        """Where old objects are held for the undo."""
        return [self._held, self._targets]

    def differences(self) -> Iterator[tuple[Any, dict[str, Any] | None, str]]:
        """Each kernel with its attributes of before, None where it does not compile anew, and what of it differs but
        for its body."""
        for key, kernel in self._targets.items():
            cls, items = self._held[key]
            before, now = dict(items), vars(kernel)
            if "rewriter" not in now and "device_caches" not in now and "configs" not in now and "values" not in now:
                yield kernel, before, "another body, and launch code may call it"
            elif cls is not type(kernel) or before.keys() - SELF_MADE != now.keys() - SELF_MADE:
                yield kernel, before, "other decorators"
            else:
                others = [n for n in before if n not in SELF_MADE and not same_setting(before[n], now[n])]
                is_new = "rewriter" in now or before.get("device_caches") is not now.get("device_caches")
                yield kernel, before if is_new else None, f"another {others[0]}" if others else ""

    def exchange(self) -> None:
        """Put the held states in force."""
        self.is_new_in_force = not self.is_new_in_force
        held, self._registry = self._registry, self._registered()
        for name in self._registry.keys() - held.keys():
            del self._library.registry[name]
        self._library.registry.update(held)
        if not self._targets:
            return
        with thawed():
            younger = self._younger()
            for key, kernel in self._targets.items():
                state, self._held[key] = self._held[key], _read(kernel)
                _write(kernel, state)
            for kernel in younger:
                was_used = kernel.hash is not None
                forget_binaries(kernel)
                if was_used:
                    key_of(kernel, self._reaches.of(kernel, self._library))
            rehash([*self._targets.values(), *younger])

    def _younger(self) -> list[Any]:
        """Kernels that were made since the states were remembered, and reach one of these."""
        kinds = self._library.kinds()
        found = [o for o in gc.get_objects() if type(o) in kinds and self._library.is_source(o)]
        others = {id(k): k for k in found if id(k) not in self._targets and not is_tritons(k.__module__)}
        callees = {key: set(self._reaches.of(kernel, self._library).callees) for key, kernel in others.items()}
        concerned: set[int] = set(self._targets)
        grown = True
        while grown:
            fresh = {key for key, reached in callees.items() if key not in concerned and reached & concerned}
            concerned |= fresh
            grown = bool(fresh)
        return [kernel for key, kernel in others.items() if key in concerned]

    def _registered(self) -> dict[str, Any]:
        return {k: v for k, v in self._library.registry.items() if k.partition(":")[0] in self._modules}


class Undone(Record):
    """Exchanges the states when the reload is undone; it stands first in the log, and comes last then."""

    def __init__(self, states: KernelStates, window: CompileWindow) -> None:
        self.states = states
        self._window = window
        self.held = states.containers()

    def exchange(self) -> None:
        self._window.close()
        if self.states.is_new_in_force:
            self.states.exchange()


class Redone(Record):
    """Exchanges the states when the reload is made good again, after all else."""

    def __init__(self, states: KernelStates) -> None:
        self._states = states

    def exchange(self) -> None:
        if not self._states.is_new_in_force:
            self._states.exchange()


def forget_binaries(kernel: Any) -> None:
    """Let `kernel` compile anew; a compile that is still under way ends in the old cache."""
    state = vars(kernel)
    state["hash"] = None
    state["used_global_vals"] = {}
    if "device_caches" in state:
        state["device_caches"] = defaultdict(kernel.create_binder)


def _read(kernel: Any) -> State:
    return type(kernel), list(vars(kernel).items())


def _write(kernel: Any, state: State) -> None:
    cls, items = state
    if type(kernel) is not cls:
        kernel.__class__ = cls
    replace_dict(vars(kernel), items)
