"""What still runs old code: frames of threads, and generators, coroutines and tasks that wait to go on."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, GeneratorType
from typing import Any

from tokenspeed_reload.errors import StillRunning
from tokenspeed_reload.report import Running

_LONGEST_SLEEP_S = 0.01
_SUSPENDED = {
    GeneratorType: ("generator", "gi_code", "gi_frame"),
    CoroutineType: ("coroutine", "cr_code", "cr_frame"),
    AsyncGeneratorType: ("asynchronous generator", "ag_code", "ag_frame"),
}

IsOld = Callable[[CodeType], bool]
"""Tells whether a code object is about to be replaced, or was."""


def kinds() -> set[type]:
    """The types that `suspended` looks at."""
    task = getattr(sys.modules.get("asyncio"), "Task", None)
    found: list[type] = [task] if task is not None else []
    for cls in found:
        found.extend(cls.__subclasses__())
    return {*_SUSPENDED, *found}


def own_frames(is_old: IsOld) -> list[Running]:
    """The frames of this thread that run old code, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    return [_running(f, "frame of the thread that reloads") for f in stack_of(frame) if is_old(f.f_code)]


def other_threads(is_old: IsOld) -> list[Running]:
    """The frames of other threads that run old code."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    return [
        _running(frame, f"frame of thread {names.get(ident, ident)}")
        for ident, top in sys._current_frames().items()
        if ident != own
        for frame in stack_of(top)
        if is_old(frame.f_code)
    ]


def suspended(objects: Iterable[Any], is_old: IsOld) -> list[Running]:
    """The generators, coroutines and tasks among `objects` that will go on with old code."""
    found: list[Running] = []
    task_kinds = kinds() - _SUSPENDED.keys()
    tasks = {id(o.get_coro()): o.get_name() for o in objects if type(o) in task_kinds and not o.done()}
    for value in objects:
        kind = _SUSPENDED.get(type(value))
        if kind is None or not is_old(getattr(value, kind[1])):
            continue
        frame = getattr(value, kind[2])
        if frame is not None and frame.f_back is None:  # one that runs right now is on the stack of its thread
            task = tasks.get(id(value))
            found.append(_running(frame, f"{kind[0]} of task {task}" if task else kind[0]))
    return found


def wait_for_others(is_old: IsOld, limit_s: float, interval_s: float) -> None:
    """Wait until no other thread runs old code.

    Meanwhile threads are switched every `interval_s` seconds; on return the interval is what it was on entry.

    Raises:
        StillRunning: some thread still does after `limit_s` seconds.
    """
    deadline = time.monotonic() + limit_s
    pause = 0.0005
    while running := other_threads(is_old):
        if time.monotonic() >= deadline:
            raise StillRunning(running, limit_s)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(interval_s)
        time.sleep(pause)
        sys.setswitchinterval(interval)
        pause = min(2 * pause, _LONGEST_SLEEP_S)


def stack_of(frame: FrameType | None) -> Iterable[FrameType]:
    """The frame and those that called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _running(frame: FrameType, where: str) -> Running:
    module = frame.f_globals.get("__name__", "?")
    return Running(f"{module}.{frame.f_code.co_qualname}", where, frame.f_lineno or frame.f_code.co_firstlineno)
