"""What a reload would do, told from the sources and the live objects; nothing is executed or written."""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterable
from dataclasses import replace
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tokenspeed_reload.bindings import LEFT, follows_in_place, is_container_statement, is_left_elsewhere, is_removed
from tokenspeed_reload.codes import CodeMap, fit
from tokenspeed_reload.definitions import DEFINING, Definitions
from tokenspeed_reload.foreseen import Foreseen, FunctionNode
from tokenspeed_reload.heap import Made, Survey, is_nested, thawed
from tokenspeed_reload.merge import NEW_CELLS, REMOVED, Merge, Replaced
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.moves import MOVED
from tokenspeed_reload.planclasses import ClassEdits, signature_changed
from tokenspeed_reload.remake import Remake
from tokenspeed_reload.report import NeedsRestart, Plan
from tokenspeed_reload.running import kinds, other_threads, own_frames, suspended
from tokenspeed_reload.runonce import RunOnce, has_cached_values
from tokenspeed_reload.stale import find_stale
from tokenspeed_reload.undo import MISSING
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
        self._foreseen = Foreseen(merge)
        self._replaced: list[Replaced] = []
        for name, code in old_codes.items():
            merge.codes[self._modules[name].old.source.path] = CodeMap(code, new_codes.get(name, code))

    def fill(self, plan: Plan) -> None:
        """Complete `plan`, whose modules are known."""
        for name, module in self._modules.items():
            bound = {n for s in module.statements() for n in s.reads.binds}
            plan.statements[name] = sorted(bound)
            plan.removed[name] = sorted(n for n in module.removed if n in module.namespace)
            self._removed(module)
            self._values(module, plan)
            self._left(module)
            self._moved(module, plan)
            self._written_to(module, plan)
        classes = ClassEdits(self._merge, self._once, self._foreseen)
        classes.look()
        self._replaced += classes.replaced
        plan.needs_restart += classes.needs_restart
        plan.patched += sorted(classes.patched | classes.moved)
        with thawed():
            remake = Remake(self._merge)
            if remake.is_due:
                plan.patched += remake.names(Made(self._merge.codes.keys(), self._modules))
            survey = Survey(self._merge.codes.keys(), kinds())
            self._functions(survey.functions, classes, plan)
            is_old = self._merge.is_replaced
            plan.running += [*own_frames(is_old), *other_threads(is_old), *suspended(survey.others, is_old)]
            hidden = [survey.functions, survey.others, self._replaced]
            plan.stale += find_stale(self._replaced, hidden, self._merge.recorded)
        bound_anew = self._bound_anew()
        held = [
            (s, [p for p in s.held_by if p.partition("[")[0] not in {*bound_anew, s.definition.rpartition(".")[0]}])
            for s in plan.stale
        ]
        plan.stale[:] = [replace(s, held_by=places) for s, places in held if places]

    def _bound_anew(self) -> set[str]:
        """The module-level names that the reload binds to something else, or deletes."""
        return {
            f"{name}.{bound}"
            for name, module in self._modules.items()
            for bound in {n for s in module.statements() for n in s.reads.binds} | module.removed | module.cleared
        }

    def _is_signed_anew(self, function: FunctionType) -> bool:
        """True for a function whose statement runs, and gives it other defaults or annotations."""
        module = self._modules.get(function.__globals__.get("__name__", ""))
        top = function.__qualname__.partition(".")[0]
        if module is None or "<locals>" in function.__qualname__:
            return False
        return any(top in s.reads.binds for s in module.statements()) and signature_changed(
            function, module, self._merge
        )

    def _is_rebuilt(self, value: Any) -> bool:
        """True for the value of a name whose statement runs, which updates it."""
        return any(module.namespace.get(name) is value for module in self._modules.values() for name in module.rebuilt)

    def _functions(self, functions: Iterable[FunctionType], classes: ClassEdits, plan: Plan) -> None:
        patched: list[str] = []
        redirected: list[str] = []
        switched = {f"{name}.{n}" for name, module in self._modules.items() for n in self._foreseen.switched(module)}
        for function in functions:
            where = f"{function.__module__}.{function.__qualname__}"
            owner = where.rpartition(".")[0]
            if owner in classes.moved and self._merge.follower(function.__code__) is not None:
                redirected.append(where)
                continue
            if where in classes.left:
                continue
            if not self._merge.is_replaced(function.__code__):
                if where in switched or self._is_signed_anew(function):
                    patched.append(where)
                continue
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
                patched += [owner] if "." in function.__qualname__ and "<locals>" not in owner else []
            else:
                self._replaced.append(Replaced(where, function, NEW_CELLS))
                continue
            if has_cached_values(function):
                plan.needs_restart.append(NeedsRestart(where, RunOnce.WHY_KEPT))
            elif self._once.function(function, function.__globals__):
                plan.needs_restart.append(NeedsRestart(where, RunOnce.WHY))
        plan.patched[:] = sorted({*patched, *plan.patched})
        plan.redirected[:] = sorted({*redirected, *plan.redirected})

    def _removed(self, module: ModuleInputs) -> None:
        for name in sorted(module.removed):
            value: Any = module.namespace.get(name)
            if is_removed(value, module, name):
                self._replaced.append(Replaced(f"{module.name}.{name}", value, REMOVED))
        for name in sorted(module.value_names & module.dirty):
            value = module.namespace.get(name)
            kinds_now = module.new.kinds_of(name)
            own = is_a(value, FunctionType | type) and (value.__module__, value.__qualname__) == (module.name, name)
            if own and module.old.kinds_of(name) & DEFINING and not kinds_now & DEFINING:
                self._replaced.append(Replaced(f"{module.name}.{name}", value, "it became another kind of object"))

    def _left(self, module: ModuleInputs) -> None:
        """Tell of imported objects, and of aliases, in whose place a name has another one that is there already."""
        bound = {n for s in module.statements() for n in s.reads.binds} | self._foreseen.starred(module)
        for name in sorted(bound & module.namespace.keys()):
            held: Any = module.namespace[name]
            if not is_atom(held) and is_left_elsewhere(module, name, held) and self._is_other(module, name, held):
                self._replaced.append(Replaced(f"{module.name}.{name}", held, LEFT, goes_on=True))

    def _is_other(self, module: ModuleInputs, name: str, held: Any) -> bool:
        """True when a name stands for another object than `held` after the reload."""
        becomes = self._foreseen.stands_for(module, name)
        known = any(entry.old is held for entry in self._replaced)
        return becomes is not MISSING and becomes is not held and not known

    def _moved(self, module: ModuleInputs, plan: Plan) -> None:
        """Tell of definitions in the place of which the module imports something now."""
        for name in sorted({n for s in module.statements() for n in s.reads.binds} & module.namespace.keys()):
            held: Any = module.namespace[name]
            kinds = module.old.kinds_of(name)
            if not (kinds and kinds <= DEFINING and module.new.imports(name) and self._merge.is_own(held, module)):
                continue
            self._gives_way(module, name, held, plan)

    def _gives_way(self, module: ModuleInputs, name: str, held: Any, plan: Plan) -> None:
        where = f"{module.name}.{name}"
        made = self._foreseen.makes(module, name)
        becomes = self._foreseen.stands_for(module, name)
        if type(held) is FunctionType and (isinstance(made, FunctionNode) or type(becomes) is FunctionType):
            plan.redirected.append(where)
        elif is_a(held, type) and isinstance(made, ast.ClassDef):
            plan.patched.append(where)
            methods = {s.name for s in made.body if isinstance(s, FunctionNode)}
            plan.redirected += [f"{where}.{n}" for n in sorted(methods) if type(vars(held).get(n)) is FunctionType]
            self._replaced.append(Replaced(where, held, MOVED))
        elif becomes is not MISSING:
            self._replaced.append(Replaced(where, held, "its value was built anew"))

    def _written_to(self, module: ModuleInputs, plan: Plan) -> None:
        """Functions and classes to which statements such as `f.x = 1` write."""
        for statement in (*module.statements(), *module.dropped):
            for name, _ in statement.reads.attributes if statement.kind in ("value", "other") else ():
                self._note_patched(module, name, plan)

    def _note_patched(self, module: ModuleInputs, name: str, plan: Plan) -> None:
        value: Any = module.namespace.get(name)
        if is_a(value, FunctionType | type) and value.__module__ == module.name and "<" not in value.__qualname__:
            plan.patched.append(f"{module.name}.{value.__qualname__}")

    def _values(self, module: ModuleInputs, plan: Plan) -> None:
        for name in sorted(module.rebuilt):
            value: Any = module.namespace.get(name)
            follows = follows_in_place(value, self._merge) or is_container_statement(module, name)
            follows = follows or is_a(type(value), enum.EnumMeta) or is_a(value, ModuleType)
            is_named = is_a(value, type) and value.__qualname__ == name
            if is_named and not module.old.kinds_of(name) & DEFINING and name not in self._foreseen.classes(module):
                self._note_patched(module, name, plan)
            if value is not None and not is_atom(value) and not follows:
                self._replaced.append(Replaced(f"{module.name}.{name}", value, "its value is built anew"))


def _is_made_anew(definitions: Definitions | None, function: FunctionType) -> bool:
    """True when running the module makes a function that can take over, as it does outside of functions."""
    return definitions is not None and "<locals>" not in function.__qualname__
