"""What running functions hold in local variables, which the garbage collector does not show."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any

from tokenspeed_reload.loader import within
from tokenspeed_reload.running import stack_of

_OWN = ("tokenspeed_reload",)
_HELD_BY_FRAME = 3  # the frame, the variable that reads it, the call that counts

Local = tuple[str, str]
"""The dotted name of a running function, and that of one of its variables."""


def local_variables() -> dict[int, list[Local]]:
    """The variables of the running functions of all threads, by identity of what they hold.

    A variable that closures share is left out: its cell is an object that the collector shows. The reloader's own
    functions are left out too.
    """
    found: dict[int, list[Local]] = {}
    tops = sys._current_frames()
    # Not of this function: a frame that holds itself lives on, and with it all that its callers hold.
    tops[threading.get_ident()] = sys._getframe(1)
    for top in tops.values():
        for frame in stack_of(top):
            if not frame.f_code.co_flags & CO_OPTIMIZED or within(frame.f_globals.get("__name__", ""), _OWN):
                continue  # the names of a module or of a class body are in a dict that the collector shows
            where = f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname}"
            for name, value in _plain_locals(frame):
                found.setdefault(id(value), []).append((where, name))
    return found


def _plain_locals(frame: FrameType) -> Iterator[tuple[str, Any]]:
    code = frame.f_code
    names = set(code.co_varnames) - set(code.co_cellvars)
    values: Mapping[str, Any] = frame.f_locals
    yield from [(name, value) for name, value in values.items() if name in names]
    # Before CPython 3.13 this is a dict that keeps all of it alive until the function ends; where no one else has
    # asked for it, it is emptied again, and filled anew for the next who does.
    if type(values) is dict and sys.getrefcount(values) <= _HELD_BY_FRAME:
        values.clear()
