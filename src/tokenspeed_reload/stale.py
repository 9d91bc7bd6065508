"""Who still holds an object that could not follow a reload."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from types import CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from tokenspeed_reload.adapters.caches import CACHED_FUNCTION
from tokenspeed_reload.framelocals import local_variables
from tokenspeed_reload.merge import Replaced
from tokenspeed_reload.report import Stale
from tokenspeed_reload.undo import elements_of, items_of
from tokenspeed_reload.values import attributes_of, home_told, is_a, module_name

_LEVELS = 3
_HOLDERS = 8
_SEARCHES = 8


def find_stale(
    replaced: list[Replaced],
    hidden: Iterable[Any],
    recorded: Container[str],
    tell: Callable[[str], None] = lambda what: None,
) -> list[Stale]:
    """Name who holds an object that could not follow.

    Each object takes some passes over all objects of the process.

    Args:
        replaced: the objects, each with its reason; those that turn out to be held are marked.
        hidden: holders of the reload itself.
        recorded: names of the modules whose own bindings the reload has seen to.
        tell: called after each object.
    """
    others = {id(entry.old) for entry in replaced if not entry.goes_on}
    replaced[:] = [entry for entry in replaced if not (entry.goes_on and id(entry.old) in others)]
    if not replaced:
        return []
    search = _Search(replaced, hidden, recorded)
    holders: dict[int, list[str]] = {}
    searches: Counter[tuple[str, str]] = Counter()
    found: dict[tuple[str, str], list[str]] = {}
    for entry in replaced:
        key = (entry.definition, entry.why)
        if id(entry.old) not in holders:
            searches[key] += 1
            if searches[key] > _SEARCHES:  # each is a pass over all objects: who holds the first of them tells enough
                entry.is_held = True
                continue
            holders[id(entry.old)] = search.holders(_Target(entry, recorded))
            tell(f"the search for holders of {entry.definition}")
        held_by = holders[id(entry.old)]
        entry.is_held = entry.is_held or bool(held_by)
        if entry.is_held:
            found.setdefault(key, []).extend(held_by)
    return [Stale(*key, list(dict.fromkeys(held_by))[:_HOLDERS]) for key, held_by in found.items()]


@dataclass(slots=True)
class _Step:
    """A holder on the way up, and the path from it down to the object."""

    value: Any
    path: str


class _Target:
    """The object whose holders are sought, and which of them are no news."""

    def __init__(self, entry: Replaced, recorded: Container[str]) -> None:
        self.value = entry.old
        self.inside = _inside(entry.old)
        self._goes_on = entry.goes_on
        self._recorded = recorded
        home = module_name(entry.old) if is_a(entry.old, ModuleType) else home_told(entry.old)
        self._package = (home or "").partition(".")[0]
        self._is_foreign = home not in recorded

    def is_rightful(self, module: str) -> bool:
        """True for a module whose name for the object is right after the reload, since it has it from its home."""
        if not self._goes_on:
            return False
        is_at_home = module.partition(".")[0] == self._package
        return is_at_home or module in self._recorded or is_a(self.value, ModuleType)

    def is_home(self, name: str) -> bool:
        """True for a holder of the library that the object is part of, by the holder's dotted name."""
        return self._goes_on and self._is_foreign and name.partition(".")[0] == self._package

    def is_import(self, holder: Any, key: Any) -> bool:
        """True for a dict that has the object, a module, as an import gives it."""
        if not self._goes_on or not is_a(self.value, ModuleType):
            return False
        name = module_name(self.value)
        return holder is sys.modules or key in (name, name.partition(".")[0], name.rpartition(".")[2])


class _Search:
    """Walks up from an object to the modules, classes and instances that hold it."""

    def __init__(self, replaced: list[Replaced], hidden: Iterable[Any], recorded: Container[str]) -> None:
        self._names = {id(vars(m)): n for n, m in list(sys.modules.items()) if is_a(m, ModuleType)}
        self._ignored = {id(item) for item in hidden} | {id(hidden), id(replaced), id(recorded)}
        self._classes = {
            id(entry.old) for entry in replaced if is_a(entry.old, type) and not (entry.is_part or entry.goes_on)
        }
        for entry in replaced:
            self._ignored |= {id(entry), id(vars(entry))}
        self._locals = local_variables()

    def holders(self, target: _Target) -> list[str]:
        """The places that hold the target, at most a handful."""
        found: list[str] = []
        level = [_Step(target.value, "")]
        seen = {id(target.value)}
        for _ in range(_LEVELS):
            above: list[_Step] = []
            for step in level:
                names, further, is_kept = self._above(step, target, seen)
                found.extend(names)
                above.extend(further)
                if step.path and not names and not further and not is_kept:
                    found.append(f"{_kind(step.value)}{step.path}")
            level = above[:_HOLDERS]
        found.extend(f"{_kind(step.value)}{step.path}" for step in level)
        return list(dict.fromkeys(found))[:_HOLDERS]

    def _above(self, step: _Step, target: _Target, seen: set[int]) -> tuple[list[str], list[_Step], bool]:
        """The names of the holders that have one, the others to go on with, and whether an undo needs it."""
        variables = self._locals.get(id(step.value), ())
        names = [f"{function} (local variable {name}{step.path})" for function, name in variables]
        further: list[_Step] = []
        is_kept = False
        referrers = gc.get_referrers(step.value)
        for holder in referrers:
            if id(holder) in self._classes:
                is_kept = True  # who holds the class is told of the class
                continue
            if id(holder) in target.inside or id(holder) in seen:
                is_kept = True  # a part of the object itself, or one that is followed already
                continue
            if id(holder) in self._ignored or _is_part(holder, step.value):
                is_kept = is_kept or _is_ours(holder) or id(holder) in self._ignored
                continue
            seen.add(id(holder))
            if self._is_rightful(holder, step, target):
                is_kept = True
                continue
            name, path = self._describe(holder, step.value, step.path)
            if name and self._is_kept_for_undo(holder, referrers):
                is_kept = True
                continue
            if name and target.is_home(name):
                is_kept = True
                continue
            if name and self._is_own_object(holder, target):
                name, path = "", step.path or _attribute(holder, step.value)
            if name:
                names.append(name)
            else:
                further.append(_Step(holder, path))
            if len(names) + len(further) > _HOLDERS:
                break
        del referrers
        return names, further, is_kept

    def _is_kept_for_undo(self, holder: Any, own: list[Any]) -> bool:
        """True when nothing but the reload's log holds `holder`, apart from the list `own` of this search."""
        if id(holder) in self._locals:
            return False
        referrers = gc.get_referrers(holder)
        others = [r for r in referrers if r is not own and not is_a(r, FrameType | _Step)]
        del referrers
        return bool(others) and all(id(other) in self._ignored for other in others)

    def _is_rightful(self, holder: Any, step: _Step, target: _Target) -> bool:
        """True for a namespace that has the target itself as an import from its home gives it."""
        if step.value is not target.value or not is_a(holder, dict):
            return False
        module = self._names.get(id(holder))
        if module is not None and target.is_rightful(module):
            return True
        return target.is_import(holder, next((k for k, v in items_of(holder) if v is step.value), None))

    def _is_own_object(self, holder: Any, target: _Target) -> bool:
        """True for an object of the class that the class itself holds; whoever else does is to be named."""
        if target.value is not type(holder):
            return False
        return any(id(other) in target.inside for other in gc.get_referrers(holder))

    def _describe(self, holder: Any, value: Any, path: str) -> tuple[str, str]:
        """A finished name, or an empty one and the path so far."""
        if is_a(holder, dict):
            key = next((k for k, v in items_of(holder) if v is value), None)
            module = self._names.get(id(holder))
            if module is not None:
                return f"{module}.{key}{path}", ""
            return "", f"[{key!r}]{path}" if type(key) in (str, int) else f"[...]{path}"
        if is_a(holder, list | tuple):
            index = next((i for i, v in enumerate(elements_of(holder)) if v is value), "...")
            return "", f"[{index}]{path}"
        if is_a(holder, CellType | set | frozenset | staticmethod | classmethod | property):
            return "", path
        if is_a(holder, MethodType):
            return "", f"{_attribute_of_method(holder, value)}{path}"
        if is_a(holder, FunctionType | type):
            return f"{holder.__module__}.{holder.__qualname__}", ""
        return f"{_kind(holder)}{_attribute(holder, value)}{path}", ""


def _is_ours(holder: Any) -> bool:
    return type(holder).__module__.startswith("tokenspeed_reload.") and type(holder) is not _Step


def _is_part(holder: Any, value: Any) -> bool:
    """True for holders that belong to the object itself, to this search, or to a cache of typing."""
    if type(holder) is CACHED_FUNCTION and holder.__wrapped__.__module__ == "typing":
        return True
    if is_a(holder, FrameType | _Step) or _is_ours(holder):
        return True
    if type(holder) is MethodType and holder.__self__ is value:
        kept = {id(item) for item in list(_state(value).values())}
        return any(id(above) in kept for above in gc.get_referrers(holder))
    if is_a(value, type):
        if type(holder) is value:
            return False  # an object that the class itself holds, such as a member of an enum; others may as well
        own = (value.__mro__, *(vars(value).values()))
        return any(holder is part for part in own) or type(holder) is CellType
    return False


def _inside(target: Any) -> set[int]:
    """The containers that a class consists of, by identity."""
    if not is_a(target, type):
        return set()
    held = [value for value in vars(target).values() if is_a(value, dict | list | tuple | set)]
    return {id(part) for part in (target, *gc.get_referents(vars(target)), *held)}


def _attribute(holder: Any, value: Any) -> str:
    return next((f".{name}" for name, item in list(_state(holder).items()) if item is value), "")


def _attribute_of_method(method: MethodType, value: Any) -> str:
    return ".__func__" if method.__func__ is value else ".__self__"


def _state(value: Any) -> Mapping[str, Any]:
    return vars(value) if is_a(value, type) else attributes_of(value) or {}


def _kind(holder: Any) -> str:
    cls = type(holder)
    return (
        f"{cls.__qualname__} object" if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__} object"
    )
