"""Edits of code that ran once: their effect is only in what was built before, which a restart builds anew."""

from __future__ import annotations

import sys
from typing import Any

from tokenspeed_reload.builtfrom import ABSENT, BuiltFrom, Print, print_of, print_of_value, prints_before
from tokenspeed_reload.merge import Merge
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.runonce import RunOnce, has_cached_values


class Restarts:
    """Compares what runs now with what ran once.

    Args:
        merge: the state of the reload.
        known: the prints of earlier reloads.

    Attributes:
        built_from: the prints of what is edited now, at the time when it ran.
    """

    def __init__(self, merge: Merge, known: BuiltFrom) -> None:
        self._merge = merge
        self._known = known
        self._values: dict[str, Print] = {}
        self.built_from: dict[str, Print] = {}

    def see(self, module: ModuleInputs, namespace: dict[str, Any]) -> None:
        """Take the prints of the values that a module will build anew."""
        self._values |= {f"{module.name}.{n}": print_of_value(namespace.get(n)) for n in module.rebuilt}

    def note(self, once: RunOnce) -> None:
        """Name the edits whose effect is only in what was built before this reload."""
        merge = self._merge
        functions_before = prints_before(merge.log)
        for edit in merge.edited:
            function = edit.function
            if has_cached_values(function):
                merge.restart(f"{function.__module__}.{function.__qualname__}", RunOnce.WHY_KEPT)
            elif once.function(function, function.__globals__):
                now = print_of(function)
                before = ABSENT if edit.kind == "added" else functions_before.get(id(function), now)
                if self._is_news(edit.where, before, ABSENT if edit.kind == "removed" else now):
                    merge.restart(edit.where, RunOnce.WHY)
        for module, name in merge.new_values:
            if once.value(name):
                where, value = f"{module}.{name}", vars(sys.modules[module]).get(name)
                if self._is_news(where, self._values.get(where, ABSENT), print_of_value(value)):
                    merge.restart(where, RunOnce.WHY_VALUE)

    def _is_news(self, where: str, before: Print, now: Print) -> bool:
        """True unless what ran once did so with what is there now."""
        first = self.built_from.setdefault(where, self._known.first(where, before))
        return first != now
