"""Which classes derive from which, as their bases tell: those that a reload makes, takes away, and lets go."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Sequence
from typing import Any

from tokenspeed_reload.loader import within
from tokenspeed_reload.merge import Merge
from tokenspeed_reload.undo import ClassState, NewClasses, SubclassOrder, UndoLog, outside_of, set_bases
from tokenspeed_reload.values import home_told, is_a


class Derived:
    """Keeps what bases know of other classes in step with a reload.

    Args:
        prefixes: names of the recorded packages.
    """

    def __init__(self, prefixes: Sequence[str]) -> None:
        self._prefixes = prefixes
        self._before = SubclassOrder((), is_old=True)
        self._made: list[weakref.ref[type]] = []
        self._discarded: list[weakref.ref[type]] = []

    def start(self, classes: Iterable[type]) -> None:
        """Remember what these classes know before the reload."""
        self._before = SubclassOrder(classes, is_old=True)

    def sort(self, merge: Merge) -> None:
        """Tell the classes that the new code made from those that live ones took over, and hold none of them."""
        young: Iterable[Any] = (value for value in merge.young.values() if is_a(value, type))
        own = [cls for cls in young if within(home_told(cls) or "", self._prefixes)]
        self._made += [weakref.ref(cls) for cls in own if id(cls) not in merge.live_of]
        self._discarded += [weakref.ref(cls) for cls in own if id(cls) in merge.live_of]

    @property
    def has_discarded(self) -> bool:
        """True while bases know a class that nobody needs any more."""
        return any(reference() is not None for reference in self._discarded)

    def detach(self, merge: Merge) -> None:
        """Take classes that are gone, and that only the undo log holds, out of the subclasses of their bases."""
        for entry in merge.replaced:
            if is_a(entry.old, type) and not (entry.is_held or entry.is_part or entry.goes_on):
                merge.log.once(ClassState, entry.old)
                set_bases(entry.old, outside_of(entry.old))

    def log_into(self, log: UndoLog, index: int) -> None:
        """Log what the bases know, before the records from `index` on and behind all of them."""
        self._log_into(log, index, _existing(self._made))

    def log_failed(self, log: UndoLog, index: int, raised: Container[type]) -> None:
        """Do so for a reload that is to be undone; the classes of errors that are `raised` stay known."""
        self._log_into(log, index, [c for c in _existing([*self._made, *self._discarded]) if c not in raised])

    def _log_into(self, log: UndoLog, index: int, found: list[type]) -> None:
        if not found and self._before.is_kept:
            return
        log.insert(index, [self._before])
        log.add(NewClasses(found))
        log.add(SubclassOrder({*self._before.classes(), *found}, is_old=False))


def _existing(references: Iterable[weakref.ref[type]]) -> list[type]:
    return [cls for reference in references if (cls := reference()) is not None]
