"""References to discarded new objects are replaced by the live objects that took them over."""

from __future__ import annotations

import functools
import gc
import operator
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from types import CellType, FrameType, FunctionType, GenericAlias, GetSetDescriptorType, MethodType, UnionType
from typing import Any

from tokenspeed_reload.merge import Merge
from tokenspeed_reload.undo import (
    Cell,
    ClassState,
    DictContents,
    Exchange,
    FunctionState,
    InstanceClass,
    InstanceSlots,
    ListContents,
    MethodWrapper,
    NamedValues,
    SetContents,
    cell_value,
    elements_of,
    items_of,
    replace_dict,
    replace_elements,
    set_class,
    set_item,
    slots_of,
)
from tokenspeed_reload.values import attributes_of, is_a

OLD_BASE = "a base of it was replaced by a class of another layout, from which it cannot derive in place"


class Substitution:
    """Replaces discarded objects in whatever holds them.

    Holders that existed before the reload are logged; new ones need no undo.

    Args:
        merge: the state of the reload.
        covered: tells of a container that its contents before the reload are logged otherwise.
    """

    def __init__(self, merge: Merge, covered: Callable[[Any], bool]) -> None:
        self._merge = merge
        self._covered = covered
        self._live_of = merge.live_of
        self._seen = 0
        self._kept: list[Any] = []  # what has another in its place stays alive as long as its identity is used
        self._stands_for: dict[int, list[int]] = {}

    def in_holders(self, holders: Iterable[Any]) -> None:
        """Replace in `holders`, and in immutable objects between them by building these anew."""
        self._weak_references()
        class_dicts: set[int] = set()
        pending = []
        skip = {id(d) for d in self._merge.discarded}
        for holder in holders:
            if is_a(holder, type):
                class_dicts.add(id(_class_dict(holder)))
            if id(holder) not in skip:
                pending.append(holder)
        grown = True
        while grown:
            known = len(self._live_of)
            for holder in pending:
                if id(holder) not in class_dicts and self._concerns(holder):
                    self._replace(holder)
            grown = len(self._live_of) != known

    def _weak_references(self) -> None:
        """Make, for each weak reference to a discarded object, one to the live object."""
        for discarded in self._merge.discarded[self._seen :]:
            live = self._live_of.get(id(discarded), discarded)
            if live is discarded or not type(discarded).__weakrefoffset__:
                continue
            for old in weakref.getweakrefs(discarded):
                kind = type(old)
                if kind is weakref.KeyedRef:
                    self._rebuilt(old, weakref.KeyedRef(live, old.__callback__, old.key))
                elif kind is weakref.ref:
                    self._rebuilt(old, weakref.ref(live, old.__callback__))
        self._seen = len(self._merge.discarded)

    def supersede(self, pairs: list[tuple[Any, Any]], hidden: Callable[[], list[Any]]) -> None:
        """Let the second of each pair take the place of the first in whatever holds it, but in `hidden`."""
        parts = {part for old, _ in pairs for part in self._parts(old)} | {id(pair) for pair in pairs}
        for old, new in pairs:
            self._live_of[id(old)] = new
        self._kept.extend(old for old, _ in pairs)
        self.in_process([old for old, _ in pairs], lambda: parts | set(map(id, hidden())))

    def in_process(self, replaced: list[Any], ignored: Callable[[], set[int]]) -> None:
        """Replace these objects in whatever holds them.

        What an immutable object held is in a new one then, which takes its place in turn.

        Args:
            replaced: objects that have another one in their place; the list is emptied.
            ignored: gives the identities of holders that keep them, at any time.
        """
        merge = self._merge
        own = (self._kept, merge.live_of, merge.new_of, merge.young, merge.discarded, merge.touched, merge.patched)
        sought = tuple(replaced)
        replaced.clear()
        while sought:
            known = len(self._kept)
            ours = {id(sought), *map(id, own)} | ignored()
            referrers = gc.get_referrers(*sought)  # the call is given this very tuple
            self.in_holders([holder for holder in referrers if id(holder) not in ours and _is_holder(holder)])
            del referrers
            sought = tuple(old for old in self._kept[known:] if not is_a(old, weakref.ref))

    def held_elsewhere(self) -> list[Any]:
        """What the new code made, has another in its place, and is held by something older: reference counts tell."""
        merge = self._merge
        built = [old for old in self._kept if id(old) in merge.young and not is_a(old, weakref.ref)]
        candidates = [*merge.discarded, *built, object()]
        counts: Counter[int] = Counter()
        known = set(map(id, candidates))
        # The dict of an instance may be younger than the instance.
        states = [s for s in map(attributes_of, merge.discarded) if s is not None and id(s) not in merge.young]
        for holder in (built, merge.young, *merge.young.values(), *states, merge.discarded, merge.new_of, self._kept):
            counts.update(key for key in map(id, gc.get_referents(holder)) if key in known)
        counts.update(key for key in map(id, merge.live_of.values()) if key in known)
        references = list(map(sys.getrefcount, candidates))
        least = references.pop()  # that of an object which nothing but the list of candidates holds
        return [c for c, count in zip(candidates, references, strict=False) if count - counts[id(c)] > least]

    def _parts(self, old: Any) -> set[int]:
        """What belongs to an old object itself, and goes on to hold it."""
        if not is_a(old, type):
            return set()
        parts = {id(old.__mro__), id(_class_dict(old))}
        parts |= {id(cls.__mro__) for cls in list[type](type.__subclasses__(old))}
        if id(old) in self._merge.keeping:  # its methods go on asking for it
            functions = [f for f in gc.get_referents(_class_dict(old)) if type(f) is FunctionType]
            parts |= {id(cell) for f in functions for cell in f.__closure__ or () if cell_value(cell) is old}
        return parts

    def _concerns(self, holder: Any) -> bool:
        if is_a(holder, type):
            return any(id(value) in self._live_of for value in (*vars(holder).values(), *holder.__bases__))
        return any(id(item) in self._live_of for item in gc.get_referents(holder))

    def _is_young(self, holder: Any) -> bool:
        return id(holder) in self._merge.young

    def _log(self, record: Any, holder: Any) -> None:
        if not self._is_young(holder) and not self._covered(holder):
            self._merge.log.once(record, holder)

    def _resolve(self, value: Any) -> Any:
        return self._live_of.get(id(value), value)

    def _replace(self, holder: Any) -> None:
        if is_a(holder, dict):
            self._dict(holder)
        elif is_a(holder, list | deque):
            self._log(ListContents, holder)
            for index, value in enumerate(elements_of(holder)):
                if id(value) in self._live_of:
                    set_item(holder, index, self._resolve(value))
        elif is_a(holder, set):
            self._log(SetContents, holder)
            replace_elements(holder, [self._resolve(item) for item in elements_of(holder)])
        elif type(holder) is CellType:
            self._log(Cell, holder)
            holder.cell_contents = self._resolve(cell_value(holder))
        elif type(holder) is FunctionType:
            self._function(holder)
        elif is_a(holder, type):
            self._class(holder)
        else:
            self._other(holder)

    def _dict(self, holder: dict[Any, Any]) -> None:
        items = items_of(holder)
        if any(type(key) is int and _is_at(value, key) for key, value in items):
            return  # the table in which CPython keeps what derives from a class
        changed = {key: value for key, value in items if type(key) is str and id(value) in self._live_of}
        if len(changed) == sum(id(key) in self._live_of or id(value) in self._live_of for key, value in items):
            if not self._is_young(holder) and not self._covered(holder):
                self._merge.log.add(NamedValues(holder, changed))
            for key, value in changed.items():
                set_item(holder, key, self._resolve(value))
            return
        self._log(DictContents, holder)
        replace_dict(holder, [(self._resolve(key), self._resolve(value)) for key, value in items])

    def _function(self, holder: FunctionType) -> None:
        if id(holder.__defaults__) in self._live_of:
            self._log(FunctionState, holder)
            holder.__defaults__ = self._resolve(holder.__defaults__)

    def _class(self, holder: type) -> None:
        if any(id(base) in self._live_of for base in holder.__bases__):
            self._log(ClassState, holder)
            try:
                holder.__bases__ = tuple(self._resolve(base) for base in holder.__bases__)
            except TypeError:
                self._merge.part(f"{holder.__module__}.{holder.__qualname__}", holder, OLD_BASE)
        for name, value in list(vars(holder).items()):
            if id(value) in self._live_of and name not in ("__dict__", "__weakref__"):
                self._log(ClassState, holder)
                type.__setattr__(holder, name, self._resolve(value))

    def _other(self, holder: Any) -> None:
        kind = type(holder)
        if kind is tuple:
            self._rebuilt(holder, tuple(self._resolve(item) for item in holder))
        elif kind is frozenset:
            self._rebuilt(holder, frozenset(self._resolve(item) for item in holder))
        elif kind is UnionType:
            self._rebuilt(holder, functools.reduce(operator.or_, [self._resolve(item) for item in holder.__args__]))
        elif kind is GenericAlias:
            items = tuple(self._resolve(item) for item in holder.__args__)
            self._rebuilt(holder, GenericAlias(self._resolve(holder.__origin__), items))
        elif kind is MethodType:
            self._rebuilt(holder, MethodType(self._resolve(holder.__func__), self._resolve(holder.__self__)))
        elif kind is functools.partial:
            if not self._is_young(holder):
                self._merge.log.add(Exchange(lambda: holder.__reduce__()[2], holder.__setstate__))
            arguments = tuple(self._resolve(item) for item in holder.args)
            keywords = {key: self._resolve(value) for key, value in holder.keywords.items()}
            holder.__setstate__((self._resolve(holder.func), arguments, keywords, vars(holder) or None))
        elif kind in (staticmethod, classmethod):
            if not self._is_young(holder):
                self._merge.log.once(MethodWrapper, holder)
            holder.__init__(self._resolve(holder.__func__))
        elif kind is weakref.ref or issubclass(kind, weakref.ref):
            return  # its referent has been exchanged with it
        else:
            self._instance(holder)

    def _instance(self, holder: Any) -> None:
        state = attributes_of(holder)
        if state is not None and any(id(value) in self._live_of for value in state.values()):
            self._dict(state)
        if any(id(value) in self._live_of for _, value in slots_of(holder)):
            self._log(InstanceSlots, holder)
            for slot, value in slots_of(holder):
                if id(value) in self._live_of:
                    slot.__set__(holder, self._resolve(value))
        new = self._live_of.get(id(type(holder)))
        if new is not None:
            try:
                self._log(InstanceClass, holder)
                set_class(holder, new)
            except TypeError:
                if id(type(holder)) in self._merge.keeping:
                    return  # the class is reported as stale
                self._merge.notes.append(
                    f"an instance of {new.__qualname__} made by the new code could not be moved to the live class"
                )

    def _rebuilt(self, old: Any, new: Any) -> None:
        if id(old) not in self._live_of:
            # An inner object may follow its outer one: whatever stands for that one now is to be built anew once more.
            keys = [*self._stands_for.pop(id(old), ()), id(old)]
            self._live_of.update(dict.fromkeys(keys, new))
            self._stands_for[id(new)] = keys
            self._kept.append(old)


def _is_holder(value: Any) -> bool:
    is_own = type(value).__module__.startswith("tokenspeed_reload.")
    return not is_own and not is_a(value, FrameType | GetSetDescriptorType)


def _is_at(reference: Any, address: int) -> bool:
    """True for a weak reference to a class at this address."""
    if type(reference) is not weakref.ref:
        return False
    referent = reference()
    return is_a(referent, type) and id(referent) == address


def _class_dict(cls: type) -> Any:
    return next(r for r in gc.get_referents(cls.__dict__) if is_a(r, dict))
