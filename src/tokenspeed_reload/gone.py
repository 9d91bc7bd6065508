"""Modules whose file is gone: what of them anything still needs."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType, FunctionType, ModuleType
from typing import Any

from tokenspeed_reload.dependencies import Uses
from tokenspeed_reload.records import ModuleRecord, Records, SourceText
from tokenspeed_reload.undo import Entry, Record, UndoLog
from tokenspeed_reload.values import is_a, module_name

TO_FORGET = "nothing uses {} any more, and its file is gone: a reload forgets it"
FORGOTTEN = "nothing used {} any more, and its file is gone: it was forgotten"

_MOST_PARTS = 20_000


@dataclass(frozen=True)
class Remains:
    """What modules consist of, told by reference counts.

    Attributes:
        alone: the objects that nothing but these modules holds, by identity.
        needed: names of the modules that something else holds, or of which it holds a definition.
    """

    alone: dict[int, Any]
    needed: set[str]


def remains_of(modules: Sequence[ModuleType], hidden: Iterable[Any] = ()) -> Remains:
    """Look for what of `modules` is held by anything but themselves, `sys.modules`, packages around them, and `hidden`.

    Running functions count as holders, by their local variables too.
    """
    parts = _parts(modules)
    packages = [vars(p) for m in modules for p in _package_of(m)]
    counts = _references_of([*parts.values(), *packages, *hidden, parts, modules, sys.modules], parts)
    del packages
    objects = [*parts.values(), object()]
    # Not in a loop of Python's own: the interpreter holds one reference more until it has adapted the call.
    references = list(map(sys.getrefcount, objects))
    least = references.pop()  # that of an object which nothing but the list holds
    pairs = zip(objects, references, strict=False)
    held = _reached([item for item, count in pairs if count - counts[id(item)] > least], parts)
    needed = {module_name(m) for m in modules if held & {id(m), id(vars(m))}}
    needed |= {part.__module__ for key, part in parts.items() if key in held and is_a(part, type)}
    return Remains({key: part for key, part in parts.items() if key not in held}, needed)


def _parts(modules: Sequence[ModuleType]) -> dict[int, Any]:
    """The modules, their definitions, and what these hold, without what another module or the reloader defines."""
    own = {id(vars(m)) for m in modules}
    names = {module_name(m) for m in modules}
    others = {id(vars(m)) for m in list(sys.modules.values()) if is_a(m, ModuleType)} - own
    found: dict[int, Any] = {id(m): m for m in modules}
    todo: list[Any] = list(modules)
    while todo and len(found) < _MOST_PARTS:
        for item in gc.get_referents(todo.pop()):
            if id(item) in found or id(item) in others or not gc.is_tracked(item) or is_a(item, ModuleType | FrameType):
                continue
            if is_a(item, FunctionType) and id(item.__globals__) not in own:
                continue
            if is_a(item, type) and vars(item).get("__module__") not in names:
                continue
            if type(item).__module__.startswith("tokenspeed_reload."):
                continue
            found[id(item)] = item
            todo.append(item)
    return found


def _package_of(module: ModuleType) -> list[ModuleType]:
    package = sys.modules.get(module_name(module).rpartition(".")[0])
    return [package] if package is not None and is_a(package, ModuleType) else []


def _references_of(holders: list[Any], parts: dict[int, Any]) -> Counter[int]:
    """How often these hold each part, a holder that is named twice counted once."""
    counts: Counter[int] = Counter()
    for holder in {id(holder): holder for holder in holders}.values():
        counts.update(key for key in map(id, gc.get_referents(holder)) if key in parts)
    return counts


def _reached(roots: list[Any], parts: dict[int, Any]) -> set[int]:
    held = set(map(id, roots))
    while roots:
        for item in gc.get_referents(roots.pop()):
            if id(item) in parts and id(item) not in held:
                held.add(id(item))
                roots.append(item)
    return held


class Gone:
    """Tells which modules nothing uses any more.

    Args:
        records: the recorded modules.
        uses: which of them use which.
    """

    def __init__(self, records: Records, uses: Uses) -> None:
        self._records = records
        self._uses = uses

    def unused(self, gone: Collection[str]) -> list[str]:
        """Those of the loaded modules `gone` that no other module uses, and of which nothing else holds anything."""
        found = self.without_users(gone)
        while found and (needed := remains_of([sys.modules[name] for name in sorted(found)]).needed):
            found = self.without_users(found - needed)
        return sorted(found)

    def without_users(self, gone: Collection[str], new: Mapping[str, SourceText] | None = None) -> set[str]:
        """Those of the loaded modules `gone` that no source of a recorded one names, but of such modules.

        Args:
            gone: names of modules.
            new: the sources of those that run a new one, or are about to.
        """
        if not gone:
            return set()
        users: dict[str, set[str]] = {name: set() for name in gone}
        for name, record in self._records.modules.items():
            if self._records.live(name) is not None:
                source = (new or {}).get(name, record.source)
                for used in self._uses.named(name, replace(record, source=source), users):
                    users[used].add(name)
        for name in gone:  # a package is needed by what is loaded of it
            users[name].update(other for other in list(sys.modules) if other.startswith(name + "."))
        alone = set(gone)
        while needed := {name for name in alone if users[name] - alone}:
            alone -= needed
        return alone


def forget(names: Iterable[str], everyone: Iterable[Records], log: UndoLog) -> Iterator[str]:
    """Take modules out of `sys.modules`, their packages and the records; gives the names of those that were there."""
    known = list(everyone)
    for name in names:
        module = sys.modules.get(name)
        if not is_a(module, ModuleType):
            continue
        parent, _, child = name.rpartition(".")
        holder = sys.modules.get(parent)
        if is_a(holder, ModuleType) and vars(holder).get(child) is module:
            log.add(Entry(vars(holder), child))
            del vars(holder)[child]
        taken = ForgottenModule(name, [(records, records.modules.get(name)) for records in known])
        log.add(taken)
        taken.exchange()
        yield name


class ForgottenModule(Record):
    """A module in `sys.modules`, and what is known of it."""

    def __init__(self, name: str, records: list[tuple[Records, ModuleRecord | None]]) -> None:
        self._name = name
        self._records = records
        self._held: ModuleType | None = None

    @property
    def module(self) -> ModuleType:
        """The module, while it is forgotten."""
        assert self._held is not None
        return self._held

    def exchange(self) -> None:
        if self._held is None:
            self._held = sys.modules.pop(self._name)
            for records, _ in self._records:
                records.forget(self._name)
            return
        # At the end, since others may look into `sys.modules` while it is put in order.
        sys.modules[self._name], self._held = self._held, None
        for records, record in self._records:
            if record is not None:
                records.add(record)
