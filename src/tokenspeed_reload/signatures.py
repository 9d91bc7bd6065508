"""Functions that a call made: defaults, annotations and closures that their definition gives otherwise now."""

from __future__ import annotations

import ast
from types import CodeType, FunctionType
from typing import Any

from tokenspeed_reload.codes import ANNOTATIONS, fit, redirect
from tokenspeed_reload.errors import describe
from tokenspeed_reload.makers import Cells, Maker, annotations_of, defaults_of
from tokenspeed_reload.merge import Merge
from tokenspeed_reload.names import shape_of
from tokenspeed_reload.nested import Nested, NestedVersions, outer_reads
from tokenspeed_reload.scopes import arguments_of
from tokenspeed_reload.undo import MISSING, FunctionState, cell_value
from tokenspeed_reload.values import is_a, same_dict, same_value

UNKNOWN = "it needs values of the call that made it; a new call gives them"
DECORATED = "its decorators changed; a new call of its maker applies them"


class Signature:
    """The update of one function in all but its code."""

    def __init__(
        self, function: FunctionType, old: Nested, new: Nested, versions: NestedVersions, merge: Merge, cells: Cells
    ) -> None:
        self._function = function
        self._old, self._new = old, new
        self._versions = versions
        self._merge = merge
        self._cells = cells
        self._where = f"{versions.module.name}.{function.__code__.co_qualname}"
        filled = {name for name, cell in cells.items() if cell_value(cell) is not MISSING}
        self._known = {name for name in filled if old.is_bound_once(name)}

    def update(self) -> None:
        """Update what can be, and report the rest."""
        function, merge = self._function, self._merge
        assert not isinstance(self._old.node, ast.ClassDef) and not isinstance(self._new.node, ast.ClassDef)
        if _decorators(self._old.node) != _decorators(self._new.node):
            merge.part(self._where, function, DECORATED)
        defaults = self._values(defaults_of(self._old.node), defaults_of(self._new.node), self._live_defaults())
        missing = defaults_of(self._new.node).keys() - defaults.keys()
        if missing:
            merge.pinned[id(function)] = function
            merge.part(self._where, function, UNKNOWN)
            return
        annotations = dict(function.__annotations__)
        wanted = annotations_of(self._new.node)
        if not self._merge.codes_of(self._versions.module).flags & ANNOTATIONS:
            before = {} if self._versions.module.has_other_futures else annotations_of(self._old.node)
            annotations = self._values(before, wanted, annotations)
        else:
            annotations = {name: ast.unparse(node) for name, node in wanted.items()}
        self._write(defaults, annotations)

    def _live_defaults(self) -> dict[str, Any]:
        function, code = self._function, self._function.__code__
        held = function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount]
        found = dict(zip(names[len(names) - len(held) :], held, strict=True)) if len(held) <= len(names) else {}
        return found | (function.__kwdefaults__ or {})

    def _values(self, before: dict[str, ast.expr], after: dict[str, ast.expr], live: dict[str, Any]) -> dict[str, Any]:
        """The values of expressions: those of unchanged ones stay, others are computed where it can be done."""
        found: dict[str, Any] = {}
        for name, node in after.items():
            same = name in before and shape_of(before[name]) == shape_of(node)
            if same and name in live and not self._versions.is_dirty(node, self._new):
                found[name] = live[name]
                continue
            value = self._compute(node)
            if value is not MISSING:
                found[name] = value
            elif name in live:
                found[name] = live[name]
                self._merge.part(self._where, self._function, UNKNOWN)
        return found

    def _compute(self, node: ast.expr) -> Any:
        imports = self._new.imports_of(outer_reads(node, self._new)[0] - self._known)
        now, later = outer_reads(node, self._new)
        if not now <= self._known | imports.keys() or not later <= self._cells.keys() | imports.keys():
            return MISSING
        maker = Maker(self._new, self._versions.module.new, self._merge.codes_of(self._versions.module))
        try:
            return maker.run(imports.values(), node, self._cells, self._function.__globals__)
        except Exception as error:
            self._merge.notes.append(f"a default or annotation of {self._where} failed: {describe(error)}")
            return MISSING

    def _write(self, defaults: dict[str, Any], annotations: dict[str, Any]) -> None:
        function, merge = self._function, self._merge
        assert not isinstance(self._new.node, ast.ClassDef)
        after = merge.follower(function.__code__)
        assert after is not None
        code = fit(after, function, merge.definitions_for(after))
        parameters = [a.arg for a in arguments_of(self._new.node.args)]
        keywords = {a.arg for a in self._new.node.args.kwonlyargs}
        positional = tuple(defaults[n] for n in parameters if n in defaults.keys() - keywords)
        wanted: dict[str, Any] = {
            "__defaults__": positional or None,
            "__kwdefaults__": {n: v for n, v in defaults.items() if n in keywords} or None,
            "__annotations__": annotations,
        }
        if function.__doc__ == _text(function.__code__):
            wanted["__doc__"] = _text(after)
        if code is None:  # where the new closure is not known either, it is reported with all other such functions
            if all(name in self._cells for name in after.co_freevars):
                self._redirect(wanted)
            return
        for name, value in wanted.items():
            held = getattr(function, name)
            same = same_dict(held, value) if is_a(value, dict) or is_a(held, dict) else same_value(held, value)
            if not same:
                merge.log.once(FunctionState, function)
                setattr(function, name, value)
                merge.touch(function)

    def _redirect(self, wanted: dict[str, Any]) -> None:
        """Let the function call a new one, whose closure has the further values."""
        function, merge = self._function, self._merge
        after = merge.follower(function.__code__)
        assert after is not None
        closure = tuple(self._cells[name] for name in after.co_freevars)
        target = FunctionType(after, function.__globals__, function.__name__, None, closure)
        for name, value in (wanted | {"__qualname__": function.__qualname__}).items():
            setattr(target, name, value)
        merge.log.once(FunctionState, function)
        redirect(function, target)
        merge.touch(function)


def _decorators(node: ast.AST) -> list[str]:
    return [shape_of(d) for d in getattr(node, "decorator_list", ())]


def _text(code: CodeType) -> str | None:
    """The docstring that a function of this code has."""
    first = code.co_consts[0] if code.co_consts else None
    return first if isinstance(first, str) else None
