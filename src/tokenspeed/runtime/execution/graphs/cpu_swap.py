"""Exchanges the code of launches in recorded steps.

A step was recorded with what its launches returned and what the Python code between them decided. So an edit of the
body of a function reaches the launches alone if that function never ran between them, and if they still return
tensors of the same kind; then a recording of the new code would differ in the code of launches only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenspeed.runtime.execution.graphs.base import BodyEdit, CannotSwap
from tokenspeed.runtime.execution.graphs.launches import LaunchCall, OutsideCode
from tokenspeed.runtime.execution.graphs.snapshot import Snapshotter


class CpuSwap:
    """New snapshots for launches of one step."""

    def __init__(self, calls: Sequence[tuple[LaunchCall, Callable[..., Any]]]) -> None:
        self.num_nodes = len(calls)
        self.specialisations = frozenset((call.name, call.specialisation) for call, _ in calls)
        self._calls = calls
        self._before: list[tuple[LaunchCall, Callable[..., Any]]] = []

    def apply(self) -> None:
        for call, code in self._calls:
            self._before.append((call, call.code))
            call.exchange(code, checked=True)

    def undo(self) -> None:
        while self._before:
            call, code = self._before.pop()
            call.exchange(code, checked=False)

    def keep(self) -> None:
        for call, code in self._calls:
            call.exchange(code, checked=False)
        self._before.clear()


class CpuSwapper:
    """Finds the launches that run what an edit changed.

    `packages` are the prefixes of the modules that are edited in place.
    """

    def __init__(self, packages: Sequence[str], edit: BodyEdit) -> None:
        self._packages = packages
        self._edit = edit
        changed = [*edit.functions, *(part for edited in edit.kernels for part in (edited.kernel, edited.kernel.fn))]
        self._changed = {id(part): part for part in changed}
        self._reached: dict[int, tuple[Any, set[int]]] = {}
        self._found: set[int] = set()
        self._snapshots = Snapshotter(packages)

    def check(self, outside: Iterable[OutsideCode]) -> None:
        """Refuse what ran between launches. Raises CannotSwap."""
        for part in self._changed.values():
            function = getattr(part, "fn", part)
            if any(function in seen for seen in outside):
                raise CannotSwap(f"{function.__module__}.{function.__qualname__} runs outside of kernels too")

    def swap(self, launches: Sequence[LaunchCall]) -> CpuSwap:
        """New code for those of the launches that need it. Raises CannotSwap."""
        calls = []
        for call in launches:
            if self._reaches(call.function):
                calls.append((call, self._snapshots.snapshot(call.function)))
            if any(self._reaches(given) for given in call.given):
                raise CannotSwap(f"{call.name} is given a function that was edited")
        return CpuSwap(calls)

    def check_found(self) -> None:
        """Refuse functions that no launch runs: what they are for is not known. Raises CannotSwap."""
        for function in self._edit.functions:
            if id(function) not in self._found:
                raise CannotSwap(f"{function.__module__}.{function.__qualname__} is no part of a captured kernel")

    def _reaches(self, value: Any) -> bool:
        known = self._reached.get(id(value))
        if known is None:
            known = self._reached[id(value)] = (
                value,
                Snapshotter(self._packages).originals(value) & self._changed.keys(),
            )
            self._found |= known[1]
        return bool(known[1])
