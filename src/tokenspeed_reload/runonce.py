"""Which definitions run once only: an edit of them changes nothing of what they built before.

Told by name over the sources of all recorded modules, without types: a name stands for every definition that
has it, so that a use of any counts for all. What is in doubt runs again.
"""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any

from tokenspeed_reload.codes import nested
from tokenspeed_reload.definitions import Definitions, Statement, Use
from tokenspeed_reload.loader import within
from tokenspeed_reload.names import deep
from tokenspeed_reload.records import SourceText
from tokenspeed_reload.scopes import FunctionNode, local_names
from tokenspeed_reload.values import is_a

_BUILDERS = ("__init__", "__post_init__", "__new__")
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class RunOnce:
    """Answers for one state of the sources.

    Args:
        patterns: names of functions that run once by agreement; `*` stands for anything.
        modules: names of modules, with all below them, whose whole code runs once.
        sources: the source that each recorded module runs.
        definitions: gives the statements of a module.
    """

    WHY = "it runs once; what it built before this reload is kept as it is"
    WHY_KEPT = "objects keep the value that they computed before this reload"
    WHY_VALUE = "what was built from it before this reload is kept as it is"

    def __init__(
        self,
        patterns: Iterable[str],
        modules: Iterable[str],
        sources: Mapping[str, SourceText],
        definitions: Callable[[str], Definitions],
    ) -> None:
        self._patterns = tuple(patterns)
        self._modules = tuple(modules)
        self._sources = sources
        self._definitions = definitions
        self._known: dict[tuple[str, bool], bool] = {}

    def function(self, function: FunctionType, members: Mapping[str, object]) -> bool:
        """True when `function` was run once and will not run again.

        Args:
            function: as it runs now.
            members: what its module binds.
        """
        outer, _, name = function.__qualname__.rpartition(".")
        if name in _BUILDERS and self._agreed(name):
            return not self._runs_again(outer.rpartition(".")[2], called=False)
        if self._agreed(name):
            return True
        if _makes_functions(function.__code__) or _may_be_called_from_outside(outer, name, members, self._sources):
            return False
        return self._is_once(name, called=True)

    def value(self, name: str) -> bool:
        """True when only code that ran once reads the module-level `name`."""
        return self._is_once(name, called=False)

    def _agreed(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def _runs_again(self, name: str, called: bool) -> bool:
        return bool(self._uses(name)) and not self._is_once(name, called)

    def _is_once(self, name: str, called: bool) -> bool:
        key = (name, called)
        if key not in self._known:
            self._known[key] = False  # a name that is used by way of itself only is in doubt
            uses = {use for use in self._uses(name) if use.owner != name}
            self._known[key] = bool(uses) and all(self._use_is_once(use, called) for use in uses)
        return self._known[key]

    def _use_is_once(self, use: Use, called: bool) -> bool:
        if within(use.module, self._modules):
            return True
        if not use.owner or (called and not use.is_call):
            return False
        cls, _, name = use.owner.rpartition(".")
        if name in _BUILDERS and self._agreed(name):
            return not self._runs_again(cls, called=False)
        return self._agreed(name) or self._is_once(name, called=use.in_function)

    def _uses(self, name: str) -> set[Use]:
        """Everywhere that the name is mentioned, apart from imports, annotations and its own definition."""
        word = re.compile(rf"\b{re.escape(name)}\b")
        found: set[Use] = set()
        for module, source in self._sources.items():
            if word.search(source.text):
                for statement in self._definitions(module).statements:
                    found |= uses_in(statement, module).get(name, set())
        return found


def uses_in(statement: Statement, module: str) -> dict[str, set[Use]]:
    """The uses in a statement of `module`, by name; they are remembered."""
    if statement.uses is None:
        visitor = _Uses(module)
        deep(visitor.visit)(statement.node)
        statement.uses = visitor.found
    return statement.uses


class _Uses(ast.NodeVisitor):
    """Collects the uses of one module."""

    def __init__(self, module: str) -> None:
        self.found: dict[str, set[Use]] = {}
        self._module = module
        self._classes: list[str] = []
        self._owner = ""
        self._functions: list[FunctionNode] = []
        self._hidden: list[set[str]] = []

    def _add(self, name: str, *, is_call: bool = False) -> None:
        self.found.setdefault(name, set()).add(Use(self._module, self._owner, bool(self._functions), is_call))

    def _is_local(self, name: str) -> bool:
        return any(name in names for names in self._hidden)

    def _under(self, owner: str, nodes: Iterable[ast.AST]) -> None:
        before, self._owner = self._owner, owner
        for node in nodes:
            self.visit(node)
        self._owner = before

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and not self._is_local(node.id):
            self._add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self._add(node.attr)
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value.isidentifier():
            self._add(node.value)  # perhaps for getattr

    def visit_Call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Name(id=name) if not self._is_local(name):
                self._add(name, is_call=True)
            case ast.Attribute(attr=name, value=value):
                self._add(name, is_call=True)
                self.visit(value)
            case _:
                self.visit(node.func)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.asname not in (None, alias.name):
                self._under("", [ast.Name(alias.name, ast.Load())])  # its uses have another name

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if len(node.targets) > 1 or not self._is_named(target, node.value):
            self.generic_visit(node)
        elif target.id != "__all__":  # type: ignore[attr-defined]
            self._under(target.id, [node.value])  # type: ignore[attr-defined]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        is_named = self._is_named(node.target, node.value)
        if node.value is not None:
            self._under(node.target.id if is_named else self._owner, [node.value])  # type: ignore[union-attr]
        if not is_named:
            self.visit(node.target)

    def _is_named(self, target: ast.expr, value: ast.expr | None) -> bool:
        """True where a value gets a name by which all uses know it: in a module, or an alias in a class."""
        if self._functions or self._hidden or not isinstance(target, ast.Name):
            return False
        return not self._classes or isinstance(value, ast.Name)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._under("", node.decorator_list)
        functions, self._functions = self._functions, []
        self._under("" if functions else node.name, [*node.bases, *node.keywords])
        self._classes.append(node.name)
        self._under("", node.body)
        self._classes.pop()
        self._functions = functions

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node, ".".join([*self._classes[-1:], node.name]))

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node, ".".join([*self._classes[-1:], node.name]))

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._function(node, "")

    def _function(self, node: FunctionNode, name: str) -> None:
        decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
        defaults = (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None))
        self._under("", [*decorators, *defaults])
        # A function that another makes may be kept, and run at any time.
        owner = "" if self._functions or self._hidden else name
        self._functions.append(node)
        self._hidden.append(local_names(node))
        self._under(owner, [node.body] if isinstance(node, ast.Lambda) else node.body)
        self._hidden.pop()
        self._functions.pop()


def has_cached_values(function: FunctionType) -> bool:
    """True for the function of a cached property whose value some object holds."""
    outer, _, name = function.__qualname__.rpartition(".")
    cls: Any = function.__globals__.get(outer)
    if not is_a(cls, type) or not is_a(vars(cls).get(name), cached_property):
        return False
    classes = [cls]
    for known in classes:
        classes.extend(known.__subclasses__())
    return any(is_a(holder, cls) and name in vars(holder) for holder in gc.get_referrers(*classes))


def _makes_functions(code: CodeType) -> bool:
    """True when functions that the code makes may outlive the call."""
    return any(inner.co_name not in _COMPREHENSIONS for inner in nested(code))


def _may_be_called_from_outside(
    outer: str, name: str, members: Mapping[str, object], recorded: Mapping[str, SourceText]
) -> bool:
    """True for special methods and for those that override one of a class outside of the recorded modules."""
    if not outer:
        return False
    cls: Any = members.get(outer)
    if not is_a(cls, type) or (name.startswith("__") and name.endswith("__")):
        return True
    return any(name in vars(base) for base in cls.__mro__ if base.__module__ not in recorded)
