"""Imports inside snapshot functions: `from .norm import rms_norm` in a body must find the pinned code."""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib.util import resolve_name
from types import CodeType, ModuleType
from typing import Any

_IMPORT_NAME = dis.opmap["IMPORT_NAME"]


class PinnedImports:
    """Stands in for `__import__` in the globals of snapshots.

    `concerns` says whether a module name leads to pinned code; `pin` gives the pinned module for a live one,
    with at least the given names.
    """

    def __init__(
        self, concerns: Callable[[str], bool], pin: Callable[[ModuleType, frozenset[str]], ModuleType]
    ) -> None:
        self._concerns = concerns
        self._pin = pin
        # By importing code object: two functions need different names of the same module.
        self._pinned: dict[tuple[str, bool, int], ModuleType] = {}

    def pin_imports_of(self, code: CodeType, package: str | None) -> None:
        """Pin the modules that `code` would import, as far as they are loaded."""
        for inner, name, level, has_fromlist in _imports(code):
            absolute = resolve_name("." * level + name, package) if level else name
            if self._concerns(absolute) and absolute in sys.modules:
                module = sys.modules[absolute if has_fromlist else absolute.partition(".")[0]]
                self._pinned[absolute, has_fromlist, id(inner)] = self._pin(module, code_names(inner))

    def __call__(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: tuple[str, ...] | None = None,
        level: int = 0,
    ) -> ModuleType:
        package = (globals or {}).get("__package__")
        absolute = resolve_name("." * level + name, package) if level else name
        if not self._concerns(absolute):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        code = sys._getframe(1).f_code
        key = absolute, bool(fromlist), id(code)
        if key not in self._pinned:
            module = builtins.__import__(name, globals, locals, fromlist or (), level)
            self._pinned[key] = self._pin(module, code_names(code))
        return self._pinned[key]


@lru_cache(maxsize=4096)
def code_names(code: CodeType) -> frozenset[str]:
    """Every global and attribute name that a code object and those nested in it mention."""
    return frozenset().union(code.co_names, *(code_names(inner) for inner in nested_codes(code)))


def nested_codes(code: CodeType) -> Iterator[CodeType]:
    """The code objects of the functions and classes defined directly inside `code`."""
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _imports(code: CodeType) -> Iterator[tuple[CodeType, str, int, bool]]:
    """(importing code, name, level, has a from-list) for each import statement in `code`."""
    if _IMPORT_NAME in code.co_code[::2]:
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for level, fromlist, step in zip(steps, steps[1:], steps[2:], strict=False):
            if step.opname == "IMPORT_NAME":
                yield code, step.argval, level.argval, bool(fromlist.argval)
    for inner in nested_codes(code):
        yield from _imports(inner)
