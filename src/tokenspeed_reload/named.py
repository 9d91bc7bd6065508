"""The dotted names of functions and classes that a reload wrote to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

from tokenspeed_reload.codes import redirected_to
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.values import is_a


def names_of(values: Iterable[Any], modules: Mapping[str, ModuleInputs]) -> tuple[list[str], list[str]]:
    """The names of those that were updated in place, and of functions that call others now.

    Functions that a library made of a definition, as dataclasses do, are part of that and have no name of their own.
    """
    names: tuple[set[str], set[str]] = (set(), set())
    paths = {path for m in modules.values() for path in (m.old.source.path, m.new.source.path)}
    for value in values:
        if is_a(value, type) and value.__module__ in modules:
            names[0].add(f"{value.__module__}.{value.__qualname__}")
        elif type(value) is FunctionType:
            target = redirected_to(value)
            inner = value if target is None else target
            if type(inner) is not FunctionType or inner.__code__.co_filename in paths:
                names[target is not None].add(f"{value.__module__}.{value.__qualname__}")
    return sorted(names[0]), sorted(names[1])
