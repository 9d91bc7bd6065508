"""Functions and classes that calls made before the reload: what is more than code follows the edit as well.

The definition is run again with the values that the call left in closures. What needs other values of the call
cannot follow, and is reported.
"""

from __future__ import annotations

import abc
import ast
import gc
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType
from typing import Any

from tokenspeed_reload.adapters.classes import ClassAdapter
from tokenspeed_reload.codes import ANNOTATIONS, fit, is_redirection, redirect
from tokenspeed_reload.errors import describe
from tokenspeed_reload.heap import Made
from tokenspeed_reload.makers import Cells, Maker, annotations_of, class_statement, defaults_of, parameters_of
from tokenspeed_reload.merge import REMOVED, Merge, find_definition
from tokenspeed_reload.names import reads_of, shape_of
from tokenspeed_reload.nested import Nested, NestedVersions, at_code, outer_reads, outline
from tokenspeed_reload.undo import MISSING, FunctionState, cell_value
from tokenspeed_reload.values import is_a, same_dict, same_value

UNKNOWN = "it needs values of the call that made it; a new call gives them"
DECORATED = "its decorators changed; a new call of its maker applies them"
CALLED = "a call that may have made it changed; a new call of its maker gives a new class"
_DEPTH = 4


@dataclass
class _Body:
    """What of a class statement can run again.

    Attributes:
        statements: the statements of the class body.
        imports: statements of the function around it that give it names.
        left: the statements that need unknown values.
    """

    statements: list[ast.stmt] = field(default_factory=list)
    imports: list[ast.stmt] = field(default_factory=list)
    left: list[ast.stmt] = field(default_factory=list)


class Remake:
    """Brings the products of functions up to date."""

    def __init__(self, merge: Merge) -> None:
        self._merge = merge
        versions = (NestedVersions(module, merge.inputs) for module in merge.inputs.modules.values())
        self._due = {v.module.name: v for v in versions if v.is_due}
        self._paths = {v.module.old.source.path: v for v in self._due.values()}
        self._sharing: defaultdict[int, list[FunctionType]] = defaultdict(list)

    @property
    def is_due(self) -> bool:
        """True when some nested definition changed in more than code."""
        return bool(self._due)

    def run(self, made: Made) -> None:
        """Update what the process holds."""
        gc.collect(0)
        for function in made.functions:
            for cell in function.__closure__ or ():
                self._sharing[id(cell)].append(function)
        merge = self._merge
        merge.makers_ran = False
        try:
            classes = [cls for cls in made.classes if self._is_old(cls)]
            fresh = [(cls, *self._remade(cls)) for cls in classes if ".<locals>." in cls.__qualname__]
            for cls in classes:
                self._called(cls)
            merge.young.update((id(o), o) for o in gc.get_objects(generation=0))
            for cls, new, is_whole in fresh:
                if new is None:
                    continue
                where = f"{cls.__module__}.{cls.__qualname__}"
                if is_whole:
                    merge.merge(cls, new, where)
                else:
                    merge.follow(cls, new)
                    ClassAdapter().merge_members(cls, new, where, merge, skip=set())
            for function in made.functions:
                self._function(function)
        finally:
            merge.makers_ran = True
            self._sharing.clear()

    # Classes
    def _is_old(self, cls: type) -> bool:
        """True for a class of the live modules that nothing updated yet."""
        if id(cls) in self._merge.young or id(cls) in self._merge.new_of:
            return False
        live = vars(sys.modules[cls.__module__])
        return all(f.__globals__ is live for f in vars(cls).values() if type(f) is FunctionType and _is_of(f, cls))

    def _called(self, cls: type) -> None:
        """Report a class that no statement defines, when a call that may have made it changed."""
        for name, versions in self._due.items():
            if cls.__module__ not in (name, "types"):  # the module that dataclasses gave its classes before 3.12
                continue
            if versions.is_called_for(cls) and find_definition(versions.module.old, cls.__qualname__) is None:
                self._merge.part(f"{name}.{cls.__qualname__}", cls, CALLED)

    def _remade(self, cls: type) -> tuple[Any, bool]:
        """A new class out of the new class statement, and whether it has all that the statement gives."""
        versions = self._due.get(cls.__module__)
        if versions is None:
            return None, False
        where = f"{cls.__module__}.{cls.__qualname__}"
        olds, news = versions.named(cls.__qualname__)
        olds, news = [[n for n in side if isinstance(n.node, ast.ClassDef)] for side in (olds, news)]
        if not olds or olds[0].is_member:
            return None, False  # a member follows the class around it
        if not news:
            self._merge.replace(where, cls, REMOVED)
            return None, False
        if len(olds) > 1 or len(news) > 1:
            if sorted(outline(n.node) for n in olds) != sorted(outline(n.node) for n in news):
                self._merge.part(where, cls, "it cannot be told which of several definitions made it")
            return None, False
        old, new = olds[0], news[0]
        if outline(old.node) == outline(new.node) and not versions.reads_dirty(new):
            return None, False
        return self._run_class(cls, old, new, versions)

    def _run_class(self, cls: type, old: Nested, new: Nested, versions: NestedVersions) -> tuple[Any, bool]:
        where = f"{cls.__module__}.{cls.__qualname__}"
        assert isinstance(old.node, ast.ClassDef) and isinstance(new.node, ast.ClassDef)
        cells = self._cells(_functions_of(cls), f"{cls.__qualname__}.")
        certain = self._certain(cells, old)
        body = self._body(new, cells, certain)
        bases, hidden = self._bases(cls, old.node, new, certain | set(new.imports_of(new.outer_names)))
        header = [*new.node.decorator_list, *(k.value for k in new.node.keywords), *bases]
        body.imports += self._imports(header, new, certain)
        imported = new.imports_of(new.outer_names).keys()
        is_whole = all(outer_reads(part, new)[0] <= certain | imported for part in header)
        is_plain = type(cls) in (type, abc.ABCMeta)
        is_whole = is_whole and (not body.left or (is_plain and not new.node.decorator_list))
        changed_header = _header(old.node) != _header(new.node)
        if not is_whole and (not is_plain or changed_header or _fields(old.node) != _fields(new.node)):
            self._merge.part(where, cls, UNKNOWN)
            if not is_plain:
                return None, False
        self._note_left(cls, where, old.node, body, new, versions)
        node = class_statement(new.node.name, body.statements or [ast.Pass()], new.node)
        if is_whole:
            node.bases, node.keywords, node.decorator_list = bases, new.node.keywords, new.node.decorator_list
        maker = Maker(new, versions.module.new, self._merge.codes_of(versions.module))
        try:
            statements = [*body.imports, node]
            result = ast.Name(new.node.name, ast.Load())
            made = maker.run(statements, result, cells | hidden, vars(sys.modules[cls.__module__]))
        except Exception as error:
            self._merge.part(where, cls, f"its class statement failed when it ran again: {describe(error)}")
            return None, False
        if not is_a(made, type) or made.__qualname__ != cls.__qualname__:
            self._merge.part(where, cls, UNKNOWN)
            return None, False
        self._keep_rest(cls, made, old.node, body, is_whole)
        return made, is_whole

    def _body(self, new: Nested, cells: Cells, certain: set[str]) -> _Body:
        """Sort the statements of a class body by whether what they need is known."""
        assert isinstance(new.node, ast.ClassDef)
        body = _Body()
        imports = new.imports_of(new.outer_names)
        bound: set[str] = set()
        for statement in new.node.body:
            now, later = outer_reads(statement, new)
            missing = {n for n in now - bound if n not in certain} | {n for n in later if n not in cells}
            if missing <= imports.keys():
                body.statements.append(statement)
                body.imports += [imports[name] for name in sorted(missing) if imports[name] not in body.imports]
            else:
                body.left.append(statement)
            bound |= _binds(statement)
        return body

    def _imports(self, parts: Iterable[ast.expr], new: Nested, certain: set[str]) -> list[ast.stmt]:
        names = {name for part in parts for name in outer_reads(part, new)[0]} - certain
        return list(dict.fromkeys(new.imports_of(names).values()))

    def _bases(
        self, cls: type, old: ast.ClassDef, new: Nested, known: set[str]
    ) -> tuple[list[ast.expr], dict[str, CellType]]:
        """The bases of the class statement; those that are as before may need names that are not known."""
        assert isinstance(new.node, ast.ClassDef)
        if all(outer_reads(base, new)[0] <= known for base in new.node.bases):
            return list(new.node.bases), {}
        if list(map(shape_of, old.bases)) != list(map(shape_of, new.node.bases)):
            return list(new.node.bases), {}
        values = vars(cls).get("__orig_bases__", cls.__bases__)
        hidden = {f"base_{index}_": CellType(value) for index, value in enumerate(values)}
        return [ast.Name(name, ast.Load()) for name in hidden], hidden

    def _note_left(
        self, cls: type, where: str, old: ast.ClassDef, body: _Body, new: Nested, versions: NestedVersions
    ) -> None:
        """Report the members that the edit changed and that need unknown values."""
        before = {shape_of(s) for s in old.body}
        for statement in body.left:
            if shape_of(statement) in before:
                continue
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.name in vars(cls):
                known = next((s for s in old.body if getattr(s, "name", None) == statement.name), None)
                if isinstance(known, type(statement)) and outline(known) == outline(statement):
                    continue  # its code follows
            for name in sorted(_binds(statement)):
                self._merge.part(f"{where}.{name}", cls, UNKNOWN)

    def _keep_rest(self, cls: type, made: type, old: ast.ClassDef, body: _Body, is_whole: bool) -> None:
        """Give the new class what its statement did not make and the live one shall keep."""
        kept = {name for statement in body.left for name in _binds(statement)}
        if not is_whole:
            kept |= vars(cls).keys() - {name for s in old.body for name in _binds(s)}
        for name in kept - _OF_THE_CLASS:
            if name in vars(cls):
                type.__setattr__(made, name, vars(cls)[name])

    # Values of the call
    def _cells(self, functions: Iterable[FunctionType], prefix: str) -> Cells:
        """The cells of one call by name; a name of which there are several is left out."""
        cells: Cells = {}
        several: set[str] = set()
        for function in functions:
            if not function.__code__.co_qualname.startswith(prefix):
                continue
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                if cells.setdefault(name, cell) is not cell:
                    several.add(name)
        cells.pop("__class__", None)
        return {name: cell for name, cell in cells.items() if name not in several}

    def _certain(self, cells: Cells, old: Nested) -> set[str]:
        """The names whose cell holds what the definition saw when it ran."""
        filled = {name for name, cell in cells.items() if cell_value(cell) is not MISSING}
        return {name for name in filled if old.is_bound_once(name)}

    def _all_cells(self, function: FunctionType) -> Cells:
        """The cells of a function, and of the functions that the same call made."""
        around = [f for cell in function.__closure__ or () for f in self._sharing[id(cell)]]
        maker = function.__code__.co_qualname.rpartition(".<locals>.")[0]
        own = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        return self._cells(around, f"{maker}.<locals>.") | own

    # Functions
    def _function(self, function: FunctionType) -> None:
        merge = self._merge
        versions = self._paths.get(function.__code__.co_filename)
        if versions is None or function.__globals__ is not vars(sys.modules[versions.module.name]):
            return
        if merge.runs_new_code(function) or is_redirection(function):
            return
        if id(function) in merge.new_of or id(function) in merge.pinned or id(function) in merge.young:
            return
        after = merge.follower(function.__code__)
        old = at_code(versions.old, merge.padding.get(function.__code__, function.__code__))
        new = at_code(versions.new, after) if after is not None else None
        if after is None or old is None or new is None or old.is_member:
            return
        if outline(old.node) == outline(new.node) and not versions.reads_dirty(new):
            return
        _Signature(function, old, new, versions, merge, self._all_cells(function)).update()


class _Signature:
    """The update of one function in all but its code."""

    def __init__(
        self, function: FunctionType, old: Nested, new: Nested, versions: NestedVersions, merge: Merge, cells: Cells
    ) -> None:
        self._function = function
        self._old, self._new = old, new
        self._versions = versions
        self._merge = merge
        self._cells = cells
        self._where = f"{function.__module__}.{function.__code__.co_qualname}"
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
            annotations = self._values(annotations_of(self._old.node), wanted, annotations)
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
        keywords = {a.arg for a in self._new.node.args.kwonlyargs}
        positional = tuple(defaults[n] for n in parameters_of(self._new.node) if n in defaults.keys() - keywords)
        wanted: dict[str, Any] = {
            "__defaults__": positional or None,
            "__kwdefaults__": {n: v for n, v in defaults.items() if n in keywords} or None,
            "__annotations__": annotations,
        }
        if function.__doc__ == _text(function.__code__):
            wanted["__doc__"] = _text(after)
        if code is None and all(name in self._cells for name in after.co_freevars):
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


_OF_THE_CLASS = frozenset({"__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "_abc_impl"})


def _functions_of(cls: type) -> list[FunctionType]:
    """The functions in the members of a class, and inside of what decorators put around them."""
    found: list[FunctionType] = []
    todo: list[tuple[Any, int]] = [(value, 0) for value in vars(cls).values()]
    seen: set[int] = set()
    while todo:
        value, depth = todo.pop()
        if id(value) in seen or depth > _DEPTH or is_a(value, type):
            continue
        seen.add(id(value))
        if type(value) is FunctionType:
            found.append(value)
            held = [cell_value(cell) for cell in value.__closure__ or ()]
            todo += [(inner, depth + 1) for inner in (*held, value.__dict__.get("__wrapped__"))]
        elif hasattr(type(value), "__get__"):
            todo += [(inner, depth + 1) for inner in gc.get_referents(value)]
    return found


def _is_of(function: FunctionType, cls: type) -> bool:
    """True when the body of the class defines the function."""
    return function.__code__.co_qualname.startswith(f"{cls.__qualname__}.")


def _binds(statement: ast.stmt) -> set[str]:
    return reads_of(statement).binds


def _header(node: ast.ClassDef) -> list[str]:
    return [shape_of(part) for part in (*node.decorator_list, *node.bases, *node.keywords)]


def _fields(node: ast.ClassDef) -> list[str]:
    """The annotated members, out of which a decorator or a metaclass may make others."""
    return [shape_of(s) for s in node.body if isinstance(s, ast.AnnAssign)]


def _decorators(node: ast.AST) -> list[str]:
    return [shape_of(d) for d in getattr(node, "decorator_list", ())]


def _text(code: CodeType) -> str | None:
    """The docstring that a function of this code has."""
    first = code.co_consts[0] if code.co_consts else None
    return first if isinstance(first, str) else None
