"""What a reload would do, told from the sources and the live objects; nothing is executed or written."""

from __future__ import annotations

import ast
import builtins
import enum
from collections.abc import Iterable
from dataclasses import replace
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tokenspeed_reload.adapters.classes import LAYOUT, METACLASS, SLOTS
from tokenspeed_reload.bindings import follows_in_place
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
        bound_anew = self._bound_anew()
        held = [(s, [place for place in s.held_by if place not in bound_anew]) for s in plan.stale]
        plan.stale[:] = [replace(s, held_by=places) for s, places in held if places]

    def _bound_anew(self) -> set[str]:
        """The module-level names that the reload binds to something else, or deletes."""
        return {
            f"{name}.{bound}"
            for name, module in self._modules.items()
            for bound in {n for s in module.statements() for n in s.reads.binds} | module.removed | module.cleared
        }

    def _is_rebuilt(self, value: Any) -> bool:
        """True for the value of a name whose statement runs, which updates it."""
        return any(module.namespace.get(name) is value for module in self._modules.values() for name in module.rebuilt)

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
            elif _is_made_anew(definitions, function) or self._is_rebuilt(function):
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
                if why is not METACLASS:
                    self._replaced.append(Replaced(where, live, why))
        self._made_by_decorators(where, before, after, live, plan)

    def _made_by_decorators(
        self, where: str, before: ast.ClassDef, after: ast.ClassDef, live: type, plan: Plan
    ) -> None:
        """Tell of run-once methods that no one wrote, as dataclasses have, and of those that are added."""
        written = [{s.name for s in node.body if isinstance(s, ast.FunctionDef)} for node in (before, after)]
        for name in ("__init__", "__post_init__"):
            function = vars(live).get(name, None)
            if type(function) is not FunctionType or name in written[0] & written[1]:
                continue
            is_edited = name in written[0] | written[1] or _fields(before) != _fields(after)
            if is_edited and self._once.function(function, self._modules[live.__module__].namespace):
                plan.needs_restart.append(NeedsRestart(f"{where}.{name}", RunOnce.WHY))

    def _removed(self, module: ModuleInputs) -> None:
        for name in sorted(module.removed):
            value = module.namespace.get(name)
            if is_a(value, FunctionType | type) and value.__module__ == module.name:
                self._replaced.append(Replaced(f"{module.name}.{name}", value, REMOVED))

    def _values(self, module: ModuleInputs) -> None:
        for name in sorted(module.rebuilt):
            value = module.namespace.get(name)
            statements = [s for s in module.new.statements if name in s.reads.binds]
            follows = follows_in_place(value, self._merge) or all(s.is_container for s in statements)
            follows = follows or is_a(type(value), enum.EnumMeta) or is_a(value, ModuleType)
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


def _fields(node: ast.ClassDef) -> list[str]:
    """What decorators may make methods of: their own arguments, and the fields of the class."""
    fields = [s for s in node.body if isinstance(s, ast.AnnAssign)]
    return [shape_of(part) for part in (*node.decorator_list, *fields)]


def _bases(node: ast.ClassDef) -> list[str]:
    return [shape_of(base) for base in node.bases]


def _live_bases(node: ast.ClassDef, module: ModuleInputs) -> list[type]:
    """Those of the bases that exist already."""
    names = [base.id for base in node.bases if isinstance(base, ast.Name)]
    values = [module.namespace.get(name, getattr(builtins, name, None)) for name in names]
    return [value for value in values if is_a(value, type)]


def _has_builtin_base(cls: type) -> bool:
    return any(base.__module__ == "builtins" and base is not object for base in cls.__mro__)
