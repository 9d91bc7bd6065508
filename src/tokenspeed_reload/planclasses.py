"""What the two sources tell of an edited class before anything runs."""

from __future__ import annotations

import ast
import builtins
import enum
import functools
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from tokenspeed_reload.adapters.classes import LAYOUT, METACLASS, OTHER_KIND, SLOTS, convention_of
from tokenspeed_reload.bindings import follows_in_place
from tokenspeed_reload.comparison import definitions_of, find_definition, mangled
from tokenspeed_reload.foreseen import Foreseen, FunctionNode
from tokenspeed_reload.lookups import root
from tokenspeed_reload.merge import REMOVED, Merge, Replaced
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.names import dotted, reads_of, shape_of
from tokenspeed_reload.report import NeedsRestart
from tokenspeed_reload.runonce import RunOnce
from tokenspeed_reload.scopes import arguments_of
from tokenspeed_reload.values import is_a

_DESCRIPTORS = (property, staticmethod, classmethod, functools.cached_property, functools.partialmethod)
_ACCESSORS = frozenset({"getter", "setter", "deleter"})
_PROPERTY = shape_of(ast.Name("property", ast.Load()))
_HEAP_TYPE = 1 << 9
_IMPLICIT = {"__new__": "", "__init_subclass__": "cls", "__class_getitem__": "cls"}
_WITHOUT_INIT = frozenset({"eq", "order", "repr", "unsafe_hash", "match_args"})
"""Options of a dataclass that leave its `__init__` as it is."""


@dataclass
class ClassEdits:
    """What will happen to classes.

    Attributes:
        patched: the classes that will be written to, by dotted name.
        moved: those whose place a new class takes, with their objects: their methods call the new ones.
        replaced: those that objects keep.
        left: methods whose functions go on as they are, since the new ones are called otherwise.
        needs_restart: edits whose effect comes with a restart only.
    """

    merge: Merge
    once: RunOnce
    foreseen: Foreseen
    patched: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)
    replaced: list[Replaced] = field(default_factory=list)
    left: set[str] = field(default_factory=set)
    needs_restart: list[NeedsRestart] = field(default_factory=list)

    def look(self) -> None:
        """Compare the classes whose statements run."""
        for module in self.merge.inputs.modules.values():
            olds, news = self.foreseen.classes(module, is_new=False), self.foreseen.classes(module)
            for name in [n for n in news if n in olds and n in module.namespace]:
                self._class(module, olds[name], news[name], module.namespace[name])

    def _class(self, module: ModuleInputs, before: ast.ClassDef, after: ast.ClassDef, live: Any) -> None:
        if not is_a(live, type) or live.__module__ != module.name:
            return
        where = f"{module.name}.{live.__qualname__}"
        if self._is_written(module, before, after, live):
            self.patched.add(where)
        self._fixed(module, where, before, after, live)
        self._made_by_decorators(module, where, before, after, live)
        self._removed(where, before, after, live)
        for name in _named_classes(before).keys() & _named_classes(after).keys():
            self._class(module, _named_classes(before)[name], _named_classes(after)[name], vars(live).get(name))

    def _is_written(self, module: ModuleInputs, before: ast.ClassDef, after: ast.ClassDef, live: type) -> bool:
        """True when members other than functions that stay, or the bases, change."""
        if self._has_other_bases(module, after, live):
            return True
        if _header(before) != _header(after) or ast.get_docstring(before) != ast.get_docstring(after):
            return True
        fields = [list(map(shape_of, _annotated(node))) for node in (before, after)]
        if fields[0] != fields[1] or (module.has_other_futures and fields[1]):
            return True
        if any(self.merge.inputs.is_any_dirty(module, reads_of(ast.Expr(d))) for d in after.decorator_list):
            return True
        if after.decorator_list and self._fields_changed(module, before, after, live):
            return True
        old, new = _members(before), _members(after)
        edited = {*old, *new} - self.merge.comparison.unchanged_members(live)
        nested = _named_classes(before).keys() & _named_classes(after).keys()
        return any(not self._stays(module, old.get(name), new.get(name), live, name) for name in edited - nested)

    def _has_other_bases(self, module: ModuleInputs, after: ast.ClassDef, live: type) -> bool:
        """True when a base is named as before, and another class has the name."""
        named = [(b.id, held) for b, held in zip(after.bases, live.__bases__, strict=False) if isinstance(b, ast.Name)]
        becomes = [(self.foreseen.stands_for(module, name), held) for name, held in named]
        return any(is_a(value, type) and value is not held for value, held in becomes)

    def _stays(
        self, module: ModuleInputs, before: ast.stmt | None, after: ast.stmt | None, live: type, name: str
    ) -> bool:
        """True for a member whose object is updated, and not exchanged."""
        if before is None or after is None:
            return False
        held = vars(live).get(name)
        if type(held) is FunctionType:
            if not isinstance(before, FunctionNode) or not isinstance(after, FunctionNode):
                return False
            return not after.decorator_list or _maker(before) == _maker(after)
        if type(held) in _DESCRIPTORS:
            return _maker(before) is not None and _maker(before) == _maker(after)
        if follows_in_place(held, self.merge) and _maker(before) is not None and _maker(before) == _maker(after):
            return True
        return stays_itself(after, module, self.merge)

    def _removed(self, where: str, before: ast.ClassDef, after: ast.ClassDef, live: type) -> None:
        """Tell of methods that are gone."""
        gone = _members(before).keys() - _members(after).keys()
        for name, function in [(n, vars(live).get(n)) for n in sorted(gone)]:
            if type(function) is FunctionType and self.merge.is_old_code(function):
                self.replaced.append(Replaced(f"{where}.{name}", function, REMOVED))
        for name, node in _members(after).items():
            member: Any = vars(live).get(name)
            if not isinstance(node, FunctionNode) or convention_of(member) in (None, _convention(node)):
                continue
            function = member.__func__ if is_a(member, staticmethod | classmethod) else member
            self.left.add(f"{where}.{name}")
            if type(function) is FunctionType and self.merge.is_old_code(function):
                self.replaced.append(Replaced(f"{where}.{name}", function, OTHER_KIND))

    def _fixed(self, module: ModuleInputs, where: str, before: ast.ClassDef, after: ast.ClassDef, live: type) -> None:
        """Tell what of a class CPython fixes when it is made."""
        moved = _bases(before) != _bases(after)
        old_base, new_base = map(_best, (live.__bases__, _live_bases(after, module)))
        if _keyword(before, "metaclass") != _keyword(after, "metaclass"):
            self.needs_restart.append(NeedsRestart(where, METACLASS))
        if _slots(before) != _slots(after) or self._fields_are_slots(before, after, live):
            self._keeps_objects(where, live, SLOTS)
        elif moved and _solid(old_base) is not _solid(new_base):
            self._keeps_objects(where, live, LAYOUT)
        elif moved and _is_builtin(old_base) != _is_builtin(new_base):
            self.moved.add(where)

    def _fields_are_slots(self, before: ast.ClassDef, after: ast.ClassDef, live: type) -> bool:
        """True when a decorator made slots of the fields, which are others now."""
        made = bool(vars(live).get("__slots__")) and not _slots(before)
        names = [[ast.unparse(f.target) for f in _annotated(node)] for node in (before, after)]
        return made and names[0] != names[1]

    def _keeps_objects(self, where: str, live: type, why: str) -> None:
        """A class that gets a successor, and with it those that derive from it in the modules of the reload."""
        self.needs_restart.append(NeedsRestart(where, why))
        self.replaced.append(Replaced(where, live, why))
        self.patched.add(where)
        for sub in list[type](type.__subclasses__(live)):
            module = self.merge.inputs.modules.get(sub.__module__)
            if module is not None and any(sub.__name__ in s.reads.binds for s in module.statements()):
                self._keeps_objects(f"{sub.__module__}.{sub.__qualname__}", sub, LAYOUT)

    def _made_by_decorators(
        self, module: ModuleInputs, where: str, before: ast.ClassDef, after: ast.ClassDef, live: type
    ) -> None:
        """Tell of run-once methods that no one wrote, as dataclasses have, and of those that are added."""
        written = [{s.name for s in node.body if isinstance(s, FunctionNode)} for node in (before, after)]
        for name in ("__init__", "__post_init__"):
            function = vars(live).get(name)
            if type(function) is not FunctionType or name in written[0] & written[1]:
                continue
            is_edited = name in written[0] | written[1] or self._fields_changed(module, before, after, live)
            if is_edited and self.once.function(function, dict(module.namespace)):
                self.needs_restart.append(NeedsRestart(f"{where}.{name}", RunOnce.WHY))

    def _fields_changed(self, module: ModuleInputs, before: ast.ClassDef, after: ast.ClassDef, live: type) -> bool:
        """True when what makes an `__init__` changed: options, fields, what their defaults read, or a base's fields."""
        if _options(before) != _options(after) or list(map(shape_of, _annotated(before))) != list(
            map(shape_of, _annotated(after))
        ):
            return True
        if any(self.merge.inputs.is_any_dirty(module, reads_of(f)) for f in _annotated(after)):
            return True
        for base in live.__mro__[1:]:
            home = self.merge.inputs.modules.get(base.__module__)
            nodes = [find_definition(version, base.__qualname__) for version in (home.old, home.new)] if home else []
            shapes = [[shape_of(f) for f in _annotated(node)] for node in nodes if isinstance(node, ast.ClassDef)]
            if len(shapes) == 2 and shapes[0] != shapes[1]:
                return True
        return False


def signature_changed(function: FunctionType, module: ModuleInputs, merge: Merge) -> bool:
    """True when defaults or annotations of a function are made anew, out of another text or of what changed."""
    nodes = [definitions_of(version, function.__qualname__) for version in (module.old, module.new)]
    pairs = [[n for n in found if isinstance(n, FunctionNode)] for found in nodes]
    if any(len(found) != 1 for found in nodes) or any(len(found) != 1 for found in pairs):
        return False
    (before,), (after,) = pairs
    parts = [[shape_of(node.args), shape_of(node.returns) if node.returns else ""] for node in (before, after)]
    if parts[0] != parts[1]:
        return True
    made = [*after.args.defaults, *(d for d in after.args.kw_defaults if d is not None), after.returns]
    made += [a.annotation for a in arguments_of(after.args)]
    anew = [e for e in map(ast.Expr, filter(None, made)) if not stays_itself(e, module, merge)]
    members = merge.comparison.edited_members(module, function.__qualname__.rpartition(".")[0])
    if any(merge.inputs.is_any_dirty(module, r) or members & set(map(root, r.now)) for r in map(reads_of, anew)):
        return True
    return module.has_other_futures and bool(function.__annotations__)


def _named_classes(node: ast.ClassDef) -> dict[str, ast.ClassDef]:
    return {s.name: s for s in node.body if isinstance(s, ast.ClassDef)}


def _members(node: ast.ClassDef) -> dict[str, ast.stmt]:
    return {mangled(name, node.name): s for s in node.body for name in reads_of(s).binds}


def stays_itself(statement: ast.stmt, module: ModuleInputs, merge: Merge) -> bool:
    """True for an assignment of what is only named, and is updated in place: a function, a class, an enum's member."""
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr) else None
    name = dotted(value) if value is not None else None
    if name is None:
        return False
    first, *rest = name.split(".")
    held: Any = module.namespace.get(first)
    for part in rest:
        held = vars(held).get(part) if is_a(held, type | ModuleType) else None
    return held is not None and (follows_in_place(held, merge) or is_a(type(held), enum.EnumMeta))


def _convention(node: FunctionNode) -> str:
    """What the function of a method is given first, as `convention_of` tells of a live one."""
    decorators = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
    if node.name in _IMPLICIT:
        return _IMPLICIT[node.name]
    return "" if "staticmethod" in decorators else "cls" if "classmethod" in decorators else "self"


def _maker(node: ast.stmt) -> list[str] | None:
    """What makes a member of a function: its decorators without what they are given, or the call that is assigned."""
    if isinstance(node, FunctionNode):
        called = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
        return [_PROPERTY if isinstance(c, ast.Attribute) and c.attr in _ACCESSORS else shape_of(c) for c in called]
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    return [shape_of(value.func)] if isinstance(value, ast.Call) else None


def _header(node: ast.ClassDef) -> list[str]:
    keywords = [k for k in node.keywords if k.arg != "metaclass"]
    return [shape_of(part) for part in (*node.bases, *keywords, *node.decorator_list)]


def _annotated(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [s for s in node.body if isinstance(s, ast.AnnAssign)]


def _options(node: ast.ClassDef) -> list[str]:
    """The decorators, without the options that leave an `__init__` as it is."""
    found = []
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call):
            kept = [k for k in decorator.keywords if k.arg not in _WITHOUT_INIT]
            found.append(" ".join(map(shape_of, [decorator.func, *decorator.args, *kept])))
        else:
            found.append(shape_of(decorator))
    return found


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


def _live_bases(node: ast.ClassDef, module: ModuleInputs) -> tuple[type, ...]:
    """The bases; one that does not exist yet is taken for a plain class."""
    names = [base.id if isinstance(base, ast.Name) else "" for base in node.bases]
    values = [module.namespace.get(name, getattr(builtins, name, _Plain)) for name in names]
    return tuple(value if is_a(value, type) else _Plain for value in values) or (object,)


class _Plain:
    """Stands for a class that an edit adds."""


def _best(bases: tuple[type, ...]) -> type:
    """The base that decides how an object is laid out: the one with the largest solid base."""
    return max(bases, key=lambda base: len(_solid(base).__mro__))


def _solid(cls: type) -> type:
    """The class on the way to object that last added to the layout of its objects, slots and `__dict__` apart."""
    while (base := cls.__base__) is not None:
        if bool(vars(cls).get("__slots__")) if not _is_builtin(cls) else _sizes(cls) != _sizes(base):
            return cls
        cls = base
    return cls


def _sizes(cls: type) -> tuple[int, int]:
    return cls.__basicsize__, cls.__itemsize__


def _is_builtin(cls: type) -> bool:
    return not cls.__flags__ & _HEAP_TYPE
