"""A second form of the members of a new class, for an old class that goes on beside it."""

from __future__ import annotations

from types import CellType, FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

from tokenspeed_reload.adapters.functions import copy_function
from tokenspeed_reload.merge import Merge
from tokenspeed_reload.undo import MISSING, cell_value
from tokenspeed_reload.values import has_method, is_a


class Twin:
    """Stands for a class while its members are merged: it has a namespace, and no effect of its own."""


def twin_of(new: type, live: type, merge: Merge) -> Twin:
    """The members of `new` with functions that take `live` for their class, as `super()` asks for it."""
    copies = _Copies(new, live, merge)
    twin = Twin()
    for name, value in vars(new).items():
        if is_a(value, GetSetDescriptorType | MemberDescriptorType):
            continue
        copy = copies.of(value)
        # A descriptor that knows its owner serves one class only, unless it has been in both.
        if copy is not value or name in vars(live) or not has_method(value, "__set_name__"):
            vars(twin)[name] = copy
    vars(twin)["__qualname__"] = new.__qualname__
    return twin


class _Copies:
    """Copies of functions and of what is around them, one for each."""

    def __init__(self, new: type, live: type, merge: Merge) -> None:
        self._new = new
        self._cell = CellType(live)
        self._merge = merge
        self._known: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """A copy of a function, property, static or class method; any other value itself."""
        if id(value) in self._known:
            return self._known[id(value)]
        copy: Any = value
        if type(value) is FunctionType and id(value) in self._merge.young:
            copy = self._known[id(value)] = copy_function(value, tuple(map(self._cell_of, value.__closure__ or ())))
            if "__wrapped__" in copy.__dict__:
                copy.__dict__["__wrapped__"] = self.of(copy.__dict__["__wrapped__"])
        elif type(value) is property:
            copy = property(self.of(value.fget), self.of(value.fset), self.of(value.fdel), value.__doc__)
        elif type(value) in (staticmethod, classmethod):
            copy = type(value)(self.of(value.__func__))
        if copy is not value:
            self._known[id(value)] = self._merge.young[id(copy)] = copy
        return copy

    def _cell_of(self, cell: CellType) -> CellType:
        held = cell_value(cell)
        if held is self._new:
            return self._cell
        copy = held if held is MISSING else self.of(held)
        return cell if copy is held else CellType(copy)
