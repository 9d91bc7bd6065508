"""The one place through which every kernel and every collective is launched.

A recorder (a CPU graph being captured, a profiler that counts launches) sees each launch as one node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from tokenspeed_kernel.progress import PROGRESS


class Recorder(Protocol):
    """What watches launches while it is installed with `recording`."""

    def launch(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the launch, keep it as one node called `name`, and return its result."""


_recorder: ContextVar[Recorder | None] = ContextVar("tokenspeed_kernel_recorder", default=None)


def launch(name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)`; an installed recorder makes it one node called `name`."""
    PROGRESS.launch(name)
    recorder = _recorder.get()
    if recorder is None:
        return function(*args, **kwargs)
    return recorder.launch(name, function, args, kwargs)


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Send every launch of this context to `recorder`; None: launches are plain calls."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)
