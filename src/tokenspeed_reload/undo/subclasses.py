"""Records of which classes derive from a class: it knows them, in order, without holding them."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from tokenspeed_reload.undo.log import Record

_HEAP_TYPE = 1 << 9
_ROUNDS = 3


class NewClasses(Record):
    """Classes that a reload made: their bases know nothing of them while the old state is in force."""

    def __init__(self, classes: Iterable[type]) -> None:
        self.held = [(cls, outside_of(cls)) for cls in classes if cls.__bases__ != (object,)]

    def exchange(self) -> None:
        held, self.held = self.held, [(cls, cls.__bases__) for cls, _ in self.held]
        for cls, bases in held:
            set_bases(cls, bases)


class SubclassOrder(Record):
    """The order in which classes list those that derive from them.

    Args:
        classes: the classes.
        is_old: the order belongs to the old state, and is restored by an undo; else by going forth again.
    """

    def __init__(self, classes: Iterable[type], *, is_old: bool) -> None:
        self._lists = [(weakref.ref(cls), list(map(weakref.ref, subclasses_of(cls)))) for cls in classes]
        self._is_due = is_old

    @property
    def is_kept(self) -> bool:
        """True while all is as it was, but for classes that no longer exist."""
        return all(order == list(map(id, subclasses_of(cls))) for cls, order in self._lists_now())

    def classes(self) -> list[type]:
        """Those of the classes that still exist."""
        return [cls for cls, _ in self._lists_now()]

    def _lists_now(self) -> Iterator[tuple[type, list[int]]]:
        for reference, order in self._lists:
            cls = reference()
            if cls is not None:
                yield cls, [id(sub) for sub in (known() for known in order) if sub is not None]

    def exchange(self) -> None:
        if self._is_due:
            for _ in range(_ROUNDS):  # a class with two bases changes its place with both of them
                moved = [cls for cls, order in self._lists_now() if _restore(cls, order)]
                if not moved:
                    break
        self._is_due = not self._is_due


def _restore(cls: type, order: list[int]) -> bool:
    """Put the classes derived from `cls` in this order, others behind them; False where nothing is to be done."""
    now = {id(sub): sub for sub in subclasses_of(cls)}
    place = {key: index for index, key in enumerate(order)}
    wanted = sorted(now, key=lambda key: place.get(key, len(order)))
    if list(now) == wanted:
        return False
    for key in wanted:  # whoever gets its bases once more is the last of their list
        set_bases(now[key], (*now[key].__bases__,))
    return True


def subclasses_of(cls: type) -> list[type]:
    """The classes that derive from `cls` directly, in its order."""
    found: list[type] = type.__subclasses__(cls)
    return found


def outside_of(cls: type) -> tuple[type, ...]:
    """The bases of a class that is to be known to none of its own: objects of theirs have the same layout."""
    holder: type = cls.__base__ or object
    while holder.__base__ is not None and _layout(holder) == _layout(holder.__base__):
        holder = holder.__base__
    if not holder.__flags__ & _HEAP_TYPE:
        return (_gone(holder, ()),)
    base = holder.__base__ or object
    if base.__module__.partition(".")[0] not in sys.stdlib_module_names:
        return cls.__bases__  # to derive from it may run code of the program
    slots = vars(holder).get("__slots__")
    return (_gone(base, None if slots is None else (slots,) if isinstance(slots, str) else tuple(slots)),)


def _layout(cls: type) -> tuple[int, ...]:
    return cls.__basicsize__, cls.__itemsize__, cls.__dictoffset__, cls.__weakrefoffset__


@functools.cache
def _gone(base: type, slots: tuple[str, ...] | None) -> type:
    """A base of classes that no longer exist for the program."""
    generic = {"__orig_bases__": ()}  # without it typing refuses
    made: type = type(base)("Gone", (base,), generic if slots is None else {**generic, "__slots__": slots})
    return made


def set_bases(cls: Any, bases: tuple[type, ...]) -> bool:
    """Give a class other bases, whatever its metaclass says of it; False when CPython refuses."""
    try:
        type.__setattr__(cls, "__bases__", bases)
    except TypeError:  # slots make another layout
        return False
    return True
