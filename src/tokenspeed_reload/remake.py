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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any

from tokenspeed_reload.adapters.classes import ClassAdapter
from tokenspeed_reload.codes import is_redirection
from tokenspeed_reload.comparison import find_definition
from tokenspeed_reload.errors import describe
from tokenspeed_reload.heap import Made
from tokenspeed_reload.makers import Cells, Maker, class_statement
from tokenspeed_reload.merge import REMOVED, Merge
from tokenspeed_reload.names import reads_of, shape_of
from tokenspeed_reload.nested import Nested, NestedVersions, at_code, outer_reads, outline
from tokenspeed_reload.signatures import UNKNOWN, Signature
from tokenspeed_reload.undo import MISSING, cell_value
from tokenspeed_reload.values import has_method, is_a

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
        merge.comparison.makers_ran = False
        try:
            classes = [cls for cls in made.classes if self._is_old(cls)]
            fresh = [(cls, *self._remade(cls)) for cls in classes if ".<locals>." in cls.__qualname__]
            for cls in classes:
                for name in self._callers(cls):
                    merge.part(f"{name}.{cls.__qualname__}", cls, CALLED)
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
            merge.comparison.makers_ran = True
            self._sharing.clear()

    # Classes
    def names(self, made: Made) -> list[str]:
        """What `run` would update, or report, as dotted names."""
        classes = [cls for cls in made.classes if self._is_old(cls)]
        found = {f"{c.__module__}.{c.__qualname__}" for c in classes if self._is_due_class(c) or any(self._callers(c))}
        for function in made.functions:
            if self._due_pair(function) is not None:
                found.add(f"{function.__globals__['__name__']}.{function.__code__.co_qualname}")
        return sorted(found)

    def _is_due_class(self, cls: type) -> bool:
        versions = self._due.get(cls.__module__)
        if versions is None:
            return False
        olds, news = versions.named(cls.__qualname__)
        changed = len(olds) != len(news) or not all(map(versions.is_same, olds, news))
        return bool(olds) and not olds[0].is_member and changed

    def _is_old(self, cls: type) -> bool:
        """True for a class of the live modules that nothing updated yet."""
        if id(cls) in self._merge.young or id(cls) in self._merge.new_of:
            return False
        live = vars(sys.modules[cls.__module__])
        return all(f.__globals__ is live for f in vars(cls).values() if type(f) is FunctionType and _is_of(f, cls))

    def _callers(self, cls: type) -> Iterator[str]:
        """The modules with an edited call that may have made `cls`, which no statement defines."""
        for name, versions in self._due.items():
            if cls.__module__ not in (name, "types"):  # the module that dataclasses gave its classes before 3.12
                continue
            if versions.is_called_for(cls) and find_definition(versions.module.old, cls.__qualname__) is None:
                yield name

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
        if versions.is_same(old, new):
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
            missing = {n for n in now - bound if n not in certain} | (later - cells.keys() - {new.node.name})
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
        pair = self._due_pair(function)
        if pair is not None:
            versions = self._paths[function.__code__.co_filename]
            Signature(function, *pair, versions, self._merge, self._all_cells(function)).update()

    def _due_pair(self, function: FunctionType) -> tuple[Nested, Nested] | None:
        """The definition of a function that nothing updated yet, before and after, if more than its code changed."""
        merge, code = self._merge, function.__code__
        versions = self._paths.get(code.co_filename)
        if versions is None or function.__globals__ is not vars(sys.modules[versions.module.name]):
            return None
        if merge.runs_new_code(function) or is_redirection(function):
            return None
        if id(function) in merge.new_of or id(function) in merge.pinned or id(function) in merge.young:
            return None
        after = merge.follower(code)
        old = at_code(versions.old, merge.padding.get(code, code))
        new = at_code(versions.new, after) if after is not None else None
        if old is None or new is None or old.is_member or versions.is_same(old, new):
            return None
        return old, new


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
        elif has_method(value, "__get__"):
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
