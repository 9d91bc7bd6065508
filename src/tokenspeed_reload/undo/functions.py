"""Records of functions, of the cells of their closures, and of what wraps them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from operator import attrgetter
from types import CellType, CodeType, FunctionType
from typing import Any

from tokenspeed_reload.undo.containers import replace_dict
from tokenspeed_reload.undo.log import MISSING, Record, State, same, same_items

_FUNCTION_PARTS = (
    *("__code__", "__defaults__", "__kwdefaults__", "__annotations__", "__doc__"),
    *("__name__", "__qualname__", "__module__"),
    *(("__type_params__",) if sys.version_info >= (3, 12) else ()),
)


_parts_of: Callable[[FunctionType], tuple[Any, ...]] = attrgetter(*_FUNCTION_PARTS)


class FunctionCode(Record):
    """The code of a function, and nothing else of it."""

    def __init__(self, target: FunctionType) -> None:
        self.target = target
        self.held = target.__code__

    def exchange(self) -> None:
        held, self.held = self.held, self.target.__code__
        set_code(self.target, held)


class FunctionState(State):
    """All of a function that can be written: code, defaults, annotations, names, attributes."""

    def __init__(self, target: FunctionType) -> None:
        self.target = target
        self.held = self.read()

    def read(self) -> tuple[tuple[Any, ...], list[tuple[str, Any]]]:
        """The parts, and the attributes in their order."""
        # Reading __annotations__ of a function without any would create a dict, which is harmless.
        return _parts_of(self.target), list(self.target.__dict__.items())

    def differs(self) -> bool:
        parts, attributes = self.held
        return not same(parts, _parts_of(self.target)) or not same_items(attributes, self.target.__dict__.items())

    def exchange(self) -> None:
        (parts, attributes), self.held = self.held, self.read()
        for part, value in zip(_FUNCTION_PARTS, parts, strict=True):
            if getattr(self.target, part) is value:
                continue
            if part == "__code__":
                set_code(self.target, value)
            else:
                setattr(self.target, part, value)
        replace_dict(self.target.__dict__, attributes)


class Cell(State):
    """The contents of a closure cell."""

    def __init__(self, target: CellType) -> None:
        self.target = target
        self.held = cell_value(target)

    def exchange(self) -> None:
        held, self.held = self.held, cell_value(self.target)
        if held is MISSING:
            del self.target.cell_contents
        else:
            self.target.cell_contents = held

    def differs(self) -> bool:
        return cell_value(self.target) is not self.held


class MethodWrapper(Record):
    """The function inside of a static or class method, and the attributes that were copied from it."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.held = self.read()

    def read(self) -> tuple[Any, list[tuple[str, Any]]]:
        """The function inside, and the attributes in their order."""
        return self.target.__func__, list(vars(self.target).items())

    def exchange(self) -> None:
        (function, attributes), self.held = self.held, self.read()
        self.target.__init__(function)
        replace_dict(vars(self.target), attributes)


class CacheClear(Record):
    """A cache whose entries cannot be kept: it is emptied each time that the code changes."""

    def __init__(self, target: Any) -> None:
        self.target = target
        size = getattr(target, "cache_info", None)
        self.had_entries = size is None or size().currsize > 0

    def exchange(self) -> None:
        clear = getattr(self.target, "cache_clear", None) or self.target._clear_cache
        clear()


def cell_value(cell: CellType) -> Any:
    """What a cell holds, or MISSING when it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def set_code(function: FunctionType, code: CodeType) -> None:
    """Assign code; a plain function may become a generator or a coroutine function and back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        function.__code__ = code
