"""The launches of a recorded step, whose code can be exchanged, and what else of Python ran while it was recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any

import torch

from tokenspeed.runtime.execution.graphs.arguments import Bind, children, tensors_in
from tokenspeed.runtime.execution.graphs.base import CannotSwap
from tokenspeed.runtime.execution.graphs.reach import is_atom


class LaunchCall:
    """What a launch node calls: a snapshot of `function`, with the arguments of the recording.

    `given` are the objects among these that lead to code of the packages. `specialisation` tells types and shapes of
    all arguments.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        bind: Bind,
        code: Callable[..., Any],
        values: Sequence[Any],
        given: Sequence[Any],
    ) -> None:
        self.name = name
        self.function = function
        self.given = given
        self.specialisation = ", ".join(_text(value) for value in values)
        self.code = code
        self._bind = bind
        self._run = bind(code)
        self._outcome: Any = None

    def __call__(self, *values: Any) -> Any:
        return self._run(*values)

    def first(self, values: Sequence[Any]) -> Any:
        """The call of the recording: what comes of it is what the rest of the step was recorded with."""
        result = self._run(*values)
        self._outcome = _outcome(result, values)
        return result

    def exchange(self, code: Callable[..., Any], *, checked: bool) -> None:
        """Run `code` from now on.

        Args:
            code: a snapshot of the same function.
            checked: raise CannotSwap where its results are not such as the rest of the step was recorded with.
        """
        self.code = code
        run = self._bind(code)
        self._run = self._checked(run) if checked else run

    def _checked(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*values: Any) -> Any:
            result = run(*values)
            if _outcome(result, values) != self._outcome:
                raise CannotSwap(f"{self.name} returns tensors of other shapes, types or places")
            return result

        return checked


class OutsideCode:
    """The Python functions that ran in steps while these were recorded, but for those within launches.

    What a step does between its launches was decided by these alone.
    """

    def __init__(self) -> None:
        self._names: set[tuple[Any, str]] = set()
        self._known: dict[int, Any] = {}

    def __contains__(self, function: FunctionType) -> bool:
        return (function.__globals__.get("__name__"), function.__code__.co_qualname) in self._names

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the functions that run in this thread."""
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Look away: a launch."""
        before = sys.getprofile()
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and id(code) not in self._known:
            self._known[id(code)] = code
            self._names.add((frame.f_globals.get("__name__"), code.co_qualname))


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dense = "" if value.is_contiguous() else f" in steps of {list(value.stride())}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{dense}"
    if is_atom(value):
        return repr(value)
    return f"{type(value).__name__}({', '.join(_text(child) for _, child in children(value))})"


def _outcome(result: Any, values: Sequence[Any]) -> Any:
    """What later operations were recorded with: form, types, shapes and strides, and which tensors were given."""
    if isinstance(result, torch.Tensor):
        for index, given in enumerate(tensors_in(list(values))):
            if given is result:
                return index
        return result.dtype, tuple(result.shape), tuple(result.stride()), result.device
    if is_atom(result):
        return type(result), repr(result)
    return type(result).__qualname__, [_outcome(child, values) for _, child in children(result)]
