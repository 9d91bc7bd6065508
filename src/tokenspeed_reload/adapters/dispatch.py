"""functools.singledispatch: the live registry is brought up to date."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from tokenspeed_reload.merge import Merge
from tokenspeed_reload.undo import CacheClear, DictContents
from tokenspeed_reload.values import same_value

GENERIC_FILE = functools.singledispatch.__code__.co_filename
"""Where the code of every generic function stands."""


class SingleDispatchAdapter:
    """Updates a generic function; implementations that other modules registered stay."""

    def matches(self, live: Any, new: Any, merge: Merge) -> bool:
        """True for two generic functions."""
        return _is_generic(live) and _is_generic(new)

    def merge(self, live: Any, new: Any, where: str, merge: Merge) -> Any:
        """Update `live`."""
        merge.follow(live, new)
        registry = registry_of(live)
        wanted = dict(registry)
        names = set()
        for cls, function in new.registry.items():
            kind = merge.resolve(cls)
            old = registry.get(kind)
            wanted[kind] = function if old is None else merge.merge(old, function, where)
            names.add(kind)
        for cls, function in registry.items():
            if cls not in names and merge.is_old_code(function):
                del wanted[cls]
        if any(not same_value(registry.get(cls), value) for cls, value in wanted.items()) or len(wanted) != len(
            registry
        ):
            merge.log.once(CacheClear, live)
            merge.log.once(DictContents, registry)
            registry.clear()
            registry.update(wanted)
            live._clear_cache()
            merge.touch(registry, counts=False)
            merge.touch(live)
        return live


def forget_choices(functions: Iterable[FunctionType], merge: Merge) -> None:
    """Let generic functions choose anew once a class changed: they remember by the class of what they are given."""
    if merge.classes_changed:
        for function in filter(_is_generic, functions):
            merge.log.once(CacheClear, function)
            vars(function)["_clear_cache"]()


def registry_of(generic: Any) -> dict[Any, Any]:
    """The dict behind the read-only view that a generic function shows."""
    registry: dict[Any, Any] = next(r for r in gc.get_referents(generic.registry) if type(r) is dict)
    return registry


def _is_generic(value: Any) -> bool:
    return type(value) is FunctionType and {"registry", "dispatch", "_clear_cache"} <= value.__dict__.keys()
