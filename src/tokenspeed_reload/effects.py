"""What the recorded modules reach, before a reload: what modules write there when they run is undone with it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from types import FunctionType, MethodType, ModuleType, NoneType
from typing import Any

from tokenspeed_reload.adapters.caches import CACHED_FUNCTION
from tokenspeed_reload.loader import within
from tokenspeed_reload.undo import (
    Cell,
    ClassState,
    DictContents,
    FunctionState,
    InstanceClass,
    InstanceSlots,
    ListContents,
    Record,
    Registrations,
    SetContents,
    State,
    UndoLog,
    cell_value,
    is_abstract,
    slots_of,
)
from tokenspeed_reload.values import attributes_of, home_told, is_a

_ATOMS = frozenset({str, int, float, bool, bytes, NoneType})
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, deque)
_WRAPPERS: dict[type, Callable[[Any], list[Any]]] = {
    staticmethod: lambda value: [value.__func__],
    classmethod: lambda value: [value.__func__],
    property: lambda value: [value.fget, value.fset, value.fdel],
    cached_property: lambda value: [value.func],
    partial: lambda value: [value.func, value.args, value.keywords],
    MethodType: lambda value: [value.__func__, value.__self__],
    CACHED_FUNCTION: lambda value: [value.__wrapped__, value.__dict__],
}
"""What stands before a function, and what is inside of it; none of it calls code of the program."""


class Footprint:
    """All that the recorded modules reach, as it was before a reload.

    That is the namespaces of the modules, the functions, classes and instances of the recorded packages, closures,
    and whatever containers these hold. What a reload itself writes is logged beside it.
    """

    def __init__(self, prefixes: list[str]) -> None:
        self._prefixes = prefixes
        self._records: dict[int, State] = {}
        self._states: list[State] = []
        self._seen: set[int] = set()
        self._written: set[int] = set()
        self._kinds: dict[type, tuple[bool, bool]] = {}
        self._ours: dict[str, bool] = {}

    def take(self, modules: Iterable[ModuleType]) -> None:
        """Remember what is reached from `modules`."""
        todo: list[Any] = []
        for module in modules:
            self._seen.add(id(vars(module)))
            self._states.append(DictContents(vars(module)))
            todo.extend(vars(module).values())
        while todo:
            value = todo.pop()
            if type(value) not in _ATOMS and id(value) not in self._seen:
                inner = self._open(value)
                if inner is not None:
                    self._seen.add(id(value))
                    todo.extend(inner)

    def covers(self, container: Any) -> bool:
        """True when the contents of `container` are remembered."""
        return id(container) in self._records

    def changed(self) -> list[Any]:
        """The containers whose contents are no longer those remembered."""
        found = {key: record for key, record in self._records.items() if record.differs()}
        self._written |= found.keys()
        return [record.target for record in found.values()]  # type: ignore[attr-defined]

    def log_into(self, log: UndoLog, index: int) -> None:
        """Put what was remembered of all that changed into the log, before all that the reload wrote itself."""
        self.changed()
        found = [self._records.pop(key) for key in self._written]
        self._written.clear()
        changed = {id(record) for record in self._states if record.differs()}
        log.insert(index, found + [record for record in self._states if id(record) in changed])
        self._states = [record for record in self._states if id(record) not in changed]

    def classes(self) -> list[type]:
        """The classes of the recorded packages, and those from which they derive directly."""
        own = [record.target for record in self._states if isinstance(record, ClassState)]
        return list(dict.fromkeys([*own, *(base for cls in own for base in cls.__bases__ if base is not object)]))

    def held_containers(self) -> list[Any]:
        """The containers in which it remembers."""
        records = (*self._records.values(), *self._states)
        return [container for record in records for container in _containers_of(record)]

    def drop_moved(self, live_of: Mapping[int, Any]) -> None:
        """Take from the dicts that had `changed` what definitions registered there that have another key now."""
        for record in map(self._records.__getitem__, self._written):
            if not isinstance(record, DictContents):
                continue
            target, before = record.target, dict(record.held)
            added = {id(live_of.get(id(v))) for k, v in list(target.items()) if k not in before}
            for key in [k for k, v in before.items() if id(v) in added and target.get(k) is v]:
                del target[key]

    def without_repeats(self, live: set[int]) -> None:
        """Take from changed lists what was appended again although it had been there before."""
        for record in self._records.values():
            if isinstance(record, ListContents) and type(record.target) is list and record.differs():
                before, now = record.held, record.target
                if len(now) > len(before) and all(a is b for a, b in zip(before, now, strict=False)):
                    known = {id(item) for item in before}
                    added = [x for x in now[len(before) :] if id(x) not in known or id(x) not in live]
                    now[len(before) :] = added

    def _open(self, value: Any) -> list[Any] | None:
        """Remember the state of one object; what it holds, or None where that does not matter."""
        kind = type(value)
        if kind in _MAPPINGS:
            self._records[id(value)] = DictContents(value)
            return list(value.values())
        if kind in _SEQUENCES:
            self._records[id(value)] = ListContents(value)
            return list(value)
        if kind is set:
            self._records[id(value)] = SetContents(value)
            return list(value)
        if kind is tuple or kind is frozenset:
            return list(value)
        if kind is FunctionType:
            return self._function(value)
        if kind in _WRAPPERS:
            return _WRAPPERS[kind](value)
        if is_a(value, type):
            if not self._is_ours(value):
                return None
            self._states.append(ClassState(value))
            if is_abstract(value):
                self._states.append(Registrations(value))
            return list(vars(value).values())
        return self._instance(value, kind)

    def _function(self, value: FunctionType) -> list[Any]:
        cells = value.__closure__ or ()
        held = [cell_value(cell) for cell in cells]
        if not self._is_ours(value):
            return held
        self._states += [Cell(cell) for cell in cells if id(cell) not in self._seen]
        self._seen.update(map(id, cells))
        self._states.append(FunctionState(value))
        return [*held, *value.__dict__.values(), value.__defaults__, value.__kwdefaults__]

    def _instance(self, value: Any, kind: type) -> list[Any] | None:
        if kind not in self._kinds:
            is_ours = self._is_ours(kind)
            self._kinds[kind] = (is_ours, is_ours and any("__slots__" in vars(base) for base in kind.__mro__))
        is_ours, has_slots = self._kinds[kind]
        if not is_ours:
            return None
        self._states.append(InstanceClass(value))
        state = attributes_of(value)
        found = [] if state is None else [state]
        slots = slots_of(value) if has_slots else []
        if slots:
            self._states.append(InstanceSlots(value))
        return [*found, *(held for _, held in slots)]

    def _is_ours(self, value: Any) -> bool:
        module = home_told(value)
        if module is None:
            return False
        if module not in self._ours:
            self._ours[module] = within(module, self._prefixes)
        return self._ours[module]


def _containers_of(record: Record) -> list[Any]:
    """The containers that a record itself made."""
    match record:
        case DictContents(held=held) | InstanceSlots(held=held):
            return [vars(record), held, *held]
        case FunctionState(held=held):
            return [vars(record), held, held[0], held[1], *held[1]]
        case ClassState(held=held):
            return [vars(record), held, held[1], *held[1]]
        case ListContents(held=held) | SetContents(held=held) | Registrations(held=held):
            return [vars(record), held]
    return [vars(record)]
