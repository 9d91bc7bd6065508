"""Functions: code, defaults, annotations, attributes and closures are updated in the live object."""

from __future__ import annotations

import sys
from types import CellType, FunctionType
from typing import Any

from tokenspeed_reload.codes import fit, is_in_place, is_redirection, redirect, redirected_to
from tokenspeed_reload.merge import Edit, Merge
from tokenspeed_reload.undo import MISSING, Cell, FunctionState, cell_value, set_code
from tokenspeed_reload.values import same_code, same_dict, same_value

_NAMES = ("__doc__", "__name__", "__qualname__", "__module__")


class FunctionAdapter:
    """Updates Python functions, decorated ones through their closures."""

    def matches(self, live: Any, new: Any, merge: Merge) -> bool:
        """True for two functions of one definition."""
        if type(live) is not FunctionType or type(new) is not FunctionType:
            return False
        return merge.same_definition(live, new)

    def merge(self, live: FunctionType, new: FunctionType, where: str, merge: Merge) -> Any:
        """Update `live`; it becomes a redirection when its cells cannot hold the new closure."""
        merge.follow(live, new)
        target = live
        if is_redirection(live) and fit(new.__code__, live, merge.definitions_for(new.__code__)) is None:
            held = redirected_to(live)
            if type(held) is not FunctionType:
                self._redirect(live, new, merge)
                return live
            target = held
        code = fit(new.__code__, target, merge.definitions_for(new.__code__))
        if code is None:
            self._redirect(live, new, merge)
        else:
            merge.note_padding(code, new.__code__)
            self._update(target, new, code, where, merge)
        if id(live) in merge.patched:
            # A class that a decorator made anew is found through the cell of its methods.
            name = f"{live.__module__}.{live.__qualname__}" if ".__class__." in where else where
            merge.edited.append(Edit(name, live))
        return live

    def _update(self, live: FunctionType, new: FunctionType, code: Any, where: str, merge: Merge) -> None:
        changed = not same_code(live.__code__, code)
        moved = not is_in_place(live.__code__, code)
        wanted = self._wanted(live, new, merge)
        if changed or moved or wanted:
            merge.log.once(FunctionState, live)
            merge.touch(live, counts=changed or bool(wanted))
            if changed or moved:
                set_code(live, code)
            for name, value in wanted.items():
                setattr(live, name, value)
        self._attributes(live, new, where, merge)
        self._closure(live, new, where, merge)

    def _wanted(self, live: FunctionType, new: FunctionType, merge: Merge) -> dict[str, Any]:
        """The parts of `new` that differ from those of `live`."""
        wanted: dict[str, Any] = {
            n: getattr(new, n) for n in _NAMES if not same_value(getattr(live, n), getattr(new, n))
        }
        is_same = live.__code__.co_qualname == new.__code__.co_qualname  # and no wrapper around it
        if not is_same or not merge.comparison.keeps_defaults(live, new) or is_redirection(live):
            if not same_value(live.__defaults__, new.__defaults__):
                wanted["__defaults__"] = new.__defaults__
            if not same_dict(live.__kwdefaults__, new.__kwdefaults__):
                wanted["__kwdefaults__"] = new.__kwdefaults__
        annotations = merge.resolved(new.__annotations__)
        if not same_dict(live.__annotations__, annotations):
            wanted["__annotations__"] = annotations
        if sys.version_info >= (3, 12) and not same_value(live.__type_params__, new.__type_params__):
            wanted["__type_params__"] = new.__type_params__
        return wanted

    def _attributes(self, live: FunctionType, new: FunctionType, where: str, merge: Merge) -> None:
        for name, value in new.__dict__.items():
            old = live.__dict__.get(name, MISSING)
            stays = value if old is MISSING else merge.merge(old, value, f"{where}.{name}")
            if not same_value(old, stays):
                merge.log.once(FunctionState, live)
                live.__dict__[name] = stays
                merge.touch(live)
        defined = merge.comparison.members_at_load(live) | {"__wrapped__", "__isabstractmethod__"}
        for name in [n for n in live.__dict__ if n in defined and n not in new.__dict__]:
            merge.log.once(FunctionState, live)
            del live.__dict__[name]
            merge.touch(live)

    def _closure(self, live: FunctionType, new: FunctionType, where: str, merge: Merge) -> None:
        cells = dict(zip(live.__code__.co_freevars, live.__closure__ or (), strict=True))
        for name, cell in zip(new.__code__.co_freevars, new.__closure__ or (), strict=True):
            _update_cell(cells[name], cell, f"{where}.{name}", merge, live)

    def _redirect(self, live: FunctionType, new: FunctionType, merge: Merge) -> None:
        merge.log.once(FunctionState, live)
        target = copy_function(new)
        live.__dict__.update(new.__dict__)
        redirect(live, target)
        for name in (*_NAMES, "__annotations__"):
            setattr(live, name, getattr(new, name))
        merge.touch(live)
        merge.touch(target, counts=False)


def copy_function(function: FunctionType, closure: tuple[CellType, ...] | None = None) -> FunctionType:
    """A second function object with the same code, defaults and attributes, and the same cells unless given."""
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        closure or function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    for name in (*_NAMES, "__annotations__"):
        setattr(copy, name, getattr(function, name))
    if sys.version_info >= (3, 12):
        copy.__type_params__ = function.__type_params__
    copy.__dict__.update(function.__dict__)
    return copy


def _update_cell(live: CellType, new: CellType, where: str, merge: Merge, owner: FunctionType) -> None:
    if live is new:
        return
    old, value = cell_value(live), cell_value(new)
    if value is MISSING:
        return
    stays = value if old is MISSING else merge.merge(old, value, where)
    if not same_value(old, stays):
        merge.log.once(Cell, live)
        live.cell_contents = stays
        merge.touch(live, counts=False)
        merge.touch(owner)
