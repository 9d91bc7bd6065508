"""What a reload would do, told from the sources and the live objects; nothing is executed or written."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import Any

from tokenspeed_reload.adapters.classes import LAYOUT, METACLASS, NEW_CLASS, SLOTS
from tokenspeed_reload.codes import CodeMap, fit
from tokenspeed_reload.comparison import find_definition
from tokenspeed_reload.definitions import Definitions
from tokenspeed_reload.heap import Made, Survey, is_nested, thawed
from tokenspeed_reload.merge import NEW_CELLS, REMOVED, Merge, Replaced
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.names import shape_of
from tokenspeed_reload.remake import Remake
from tokenspeed_reload.report import NeedsRestart, Plan
from tokenspeed_reload.running import kinds, other_threads, own_frames, suspended
from tokenspeed_reload.runonce import RunOnce
from tokenspeed_reload.stale import find_stale
from tokenspeed_reload.values import is_a, is_atom


class Planner:
    """Compares the live objects of the modules of a reload with their new sources.

    Args:
        merge: the state of a reload that has not begun.
        old_codes: the code that each module runs.
        new_codes: the code of the modules whose source changed.
        once: tells which functions run once only.
    """

    def __init__(
        self, merge: Merge, old_codes: dict[str, CodeType], new_codes: dict[str, CodeType], once: RunOnce
    ) -> None:
        self._merge = merge
        self._modules = merge.inputs.modules
        self._once = once
        self._replaced: list[Replaced] = []
        for name, code in old_codes.items():
            merge.codes[self._modules[name].old.source.path] = CodeMap(code, new_codes.get(name, code))

    def fill(self, plan: Plan) -> None:
        """Complete `plan`, whose modules are known."""
        for name, module in self._modules.items():
            bound = {n for s in module.statements() for n in s.reads.binds}
            plan.statements[name] = sorted(bound)
            plan.removed[name] = sorted(n for n in module.removed if n in module.namespace)
            for definition in module.dropped:
                self._class(module, definition.node, plan)
            self._removed(module)
            self._values(module)
        with thawed():
            remake = Remake(self._merge)
            if remake.is_due:
                plan.patched += remake.names(Made(self._merge.codes.keys(), self._modules))
            survey = Survey(self._merge.codes.keys(), kinds())
            self._functions(survey.functions, plan)
            is_old = self._merge.is_replaced
            plan.running += [*own_frames(is_old), *other_threads(is_old), *suspended(survey.others, is_old)]
            hidden = [survey.functions, survey.others, self._replaced]
            plan.stale += find_stale(self._replaced, hidden)
        plan.stale[:] = [s for s in plan.stale if s.held_by]

    def _functions(self, functions: Iterable[FunctionType], plan: Plan) -> None:
        patched: list[str] = []
        redirected: list[str] = []
        for function in functions:
            if not self._merge.is_replaced(function.__code__):
                continue
            where = f"{function.__module__}.{function.__qualname__}"
            after = self._merge.follower(function.__code__)
            if after is None:
                if is_nested(function):
                    self._replaced.append(Replaced(where, function, REMOVED))
                continue
            definitions = self._merge.definitions_for(after)
            if fit(after, function, definitions) is not None:
                patched.append(where)
            elif _is_made_anew(definitions, function):
                redirected.append(where)
            else:
                self._replaced.append(Replaced(where, function, NEW_CELLS))
                continue
            if self._once.function(function, function.__globals__):
                plan.needs_restart.append(NeedsRestart(where, RunOnce.WHY))
        plan.patched[:] = sorted({*patched, *plan.patched})
        plan.redirected += sorted(set(redirected))

    def _class(self, module: ModuleInputs, before: ast.stmt, plan: Plan) -> None:
        """Tell what of an edited class is fixed, and that the class is updated."""
        if not isinstance(before, ast.ClassDef):
            return
        after = find_definition(module.new, before.name)
        live: Any = module.namespace.get(before.name)
        where = f"{module.name}.{before.name}"
        if not isinstance(after, ast.ClassDef) or not is_a(live, type):
            return
        plan.patched.append(where)
        moved = _bases(before) != _bases(after)
        is_fixed = _has_builtin_base(live) or any(map(_has_builtin_base, _live_bases(after, module)))
        for differs, why in (
            (_keyword(before, "metaclass") != _keyword(after, "metaclass"), METACLASS),
            (_slots(before) != _slots(after), SLOTS),
            (moved and is_fixed, LAYOUT),
        ):
            if differs:
                plan.needs_restart.append(NeedsRestart(where, why))
        if moved and not is_fixed and live.__bases__ == (object,):
            self._replaced.append(Replaced(where, live, NEW_CLASS))

    def _removed(self, module: ModuleInputs) -> None:
        for name in sorted(module.removed):
            value = module.namespace.get(name)
            if is_a(value, FunctionType | type) and value.__module__ == module.name:
                self._replaced.append(Replaced(f"{module.name}.{name}", value, REMOVED))

    def _values(self, module: ModuleInputs) -> None:
        for name in sorted(module.rebuilt):
            value = module.namespace.get(name)
            statements = [s for s in module.new.statements if name in s.reads.binds]
            follows = is_a(value, FunctionType | type) or all(s.is_container for s in statements)
            if value is not None and not is_atom(value) and not follows:
                self._replaced.append(Replaced(f"{module.name}.{name}", value, "its value is built anew"))


def _is_made_anew(definitions: Definitions | None, function: FunctionType) -> bool:
    """True when running the module makes a function that can take over, as it does outside of functions."""
    return definitions is not None and "<locals>" not in function.__qualname__


def _keyword(node: ast.ClassDef, name: str) -> str | None:
    return next((shape_of(k.value) for k in node.keywords if k.arg == name), None)


def _slots(node: ast.ClassDef) -> list[str]:
    return [
        shape_of(s.value)
        for s in node.body
        if isinstance(s, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__slots__" for t in s.targets)
    ]


def _bases(node: ast.ClassDef) -> list[str]:
    return [shape_of(base) for base in node.bases]


def _live_bases(node: ast.ClassDef, module: ModuleInputs) -> list[type]:
    """Those of the bases that exist already."""
    names = [base.id for base in node.bases if isinstance(base, ast.Name)]
    values = [module.namespace.get(name, getattr(builtins, name, None)) for name in names]
    return [value for value in values if is_a(value, type)]


def _has_builtin_base(cls: type) -> bool:
    return any(base.__module__ == "builtins" and base is not object for base in cls.__mro__)
