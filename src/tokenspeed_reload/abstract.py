"""Abstract base classes of the whole process: their answers about classes that a reload changed."""

from __future__ import annotations

import abc
from typing import Any

from tokenspeed_reload.merge import Merge
from tokenspeed_reload.undo import (
    AbstractCaches,
    Registrations,
    forget_answers,
    is_abstract,
    register_only,
    registered_with,
)


def kinds() -> set[type]:
    """The metaclasses of abstract base classes."""
    found: list[type] = [abc.ABCMeta]
    for cls in found:
        found.extend(list[type](type.__subclasses__(cls)))
    return set(found)


def update_abstract(objects: list[Any], merge: Merge) -> None:
    """Carry registrations over to the classes that stay, and forget every answer if a class changed."""
    discarded = {id(value) for value in merge.discarded}
    classes = [value for value in objects if is_abstract(value) and id(value) not in discarded]
    for cls in classes:
        before = registered_with(cls)
        wanted = _wanted(cls, before, merge)
        if wanted.keys() != {id(value) for value in before}:
            merge.log.once(Registrations, cls)
            register_only(cls, wanted.values())
            merge.touch(cls)
    if merge.classes_changed:
        merge.log.add(AbstractCaches(classes))
        forget_answers(classes)


def _wanted(cls: Any, before: list[type], merge: Merge) -> dict[int, type]:
    """The classes that are to be registered: those of the edit, and those that others registered."""
    new: Any = merge.new_of.get(id(cls))
    resolved = [merge.resolve(value) for value in before]
    if new is None or not is_abstract(new):
        return {id(value): value for value in resolved}
    again = [merge.resolve(value) for value in registered_with(new)]
    kept = [value for value in resolved if value.__module__ not in merge.inputs.modules]
    return {id(value): value for value in (*kept, *again)}
