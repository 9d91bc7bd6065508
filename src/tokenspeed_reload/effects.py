"""Effects of module execution on objects of other modules, such as registries."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from tokenspeed_reload.loader import within
from tokenspeed_reload.undo import (
    DictContents,
    ListContents,
    Record,
    SetContents,
    UndoLog,
    cell_value,
)
from tokenspeed_reload.values import attributes_of, home_told, is_a

_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, deque)
_MAX_DEPTH = 5


class Footprint:
    """The contents of all containers that the recorded modules reach, as they were before a reload.

    The walk follows containers, attributes of instances and classes of the recorded packages, and closures.
    """

    def __init__(self, prefixes: list[str]) -> None:
        self._prefixes = prefixes
        self._records: dict[int, Record] = {}
        self._seen: set[int] = set()
        self._written: set[int] = set()

    def take(self, modules: Iterable[ModuleType]) -> None:
        """Remember what is reached from `modules`."""
        todo: list[tuple[Any, int]] = [(value, 0) for m in modules for value in list(vars(m).values())]
        while todo:
            value, depth = todo.pop()
            if id(value) in self._seen or depth > _MAX_DEPTH:
                continue
            inner = self._open(value)
            if inner is not None:
                self._seen.add(id(value))
                todo.extend((item, depth + 1) for item in inner)

    def covers(self, container: Any) -> bool:
        """True when the contents of `container` are remembered."""
        return id(container) in self._records

    def changed(self) -> list[Any]:
        """The containers whose contents are no longer those remembered."""
        found = {key: record for key, record in self._records.items() if _differs(record)}
        self._written |= found.keys()
        return [record.target for record in found.values()]  # type: ignore[attr-defined]

    def log_into(self, log: UndoLog) -> None:
        """Put the remembered contents of changed containers first in the log, so that they are undone last."""
        self.changed()
        log.insert_first([self._records[key] for key in self._written])

    def drop_moved(self, live_of: Mapping[int, Any]) -> None:
        """Take from changed dicts the entries of definitions that registered themselves under another key now."""
        for record in self._records.values():
            if not isinstance(record, DictContents) or not _differs(record):
                continue
            target, before = record.target, dict(record.held)
            added = {id(live_of.get(id(v))) for k, v in list(target.items()) if k not in before}
            for key in [k for k, v in before.items() if id(v) in added and target.get(k) is v]:
                del target[key]

    def without_repeats(self, live: set[int]) -> None:
        """Take from changed lists what was appended again although it had been there before."""
        for record in self._records.values():
            if isinstance(record, ListContents) and type(record.target) is list and _differs(record):
                before, now = record.held, record.target
                if len(now) > len(before) and all(a is b for a, b in zip(before, now, strict=False)):
                    known = {id(item) for item in before}
                    added = [x for x in now[len(before) :] if id(x) not in known or id(x) not in live]
                    now[len(before) :] = added

    def _open(self, value: Any) -> list[Any] | None:
        kind = type(value)
        if kind in _MAPPINGS:
            self._records.setdefault(id(value), DictContents(value))
            return list(value.values())
        if kind in _SEQUENCES:
            self._records.setdefault(id(value), ListContents(value))
            return list(value)
        if kind is set:
            self._records.setdefault(id(value), SetContents(value))
            return None
        if kind is tuple:
            return list(value)
        if kind is FunctionType:
            cells = [cell_value(cell) for cell in value.__closure__ or ()]
            return [*cells, *value.__dict__.values()] if self._is_ours(value) else cells
        if is_a(value, type):
            return list(vars(value).values()) if self._is_ours(value) else None
        state = attributes_of(value) if self._is_ours(kind) else None
        return [state] if state is not None else None

    def _is_ours(self, value: Any) -> bool:
        module = home_told(value)
        return module is not None and within(module, self._prefixes)


def _differs(record: Record) -> bool:
    match record:
        case DictContents(target=target, held=held):
            return len(target) != len(held) or any(
                a is not b or c is not d for (a, c), (b, d) in zip(list(target.items()), held, strict=False)
            )
        case ListContents(target=target, held=held):
            return len(target) != len(held) or any(a is not b for a, b in zip(target, held, strict=True))
        case SetContents(target=target, held=held):
            return {id(item) for item in target} != {id(item) for item in held}
    return False
