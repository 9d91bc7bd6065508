"""Which names a piece of syntax reads, and when.

A read is a dotted string: "x" when the object itself is used, "x.y.z" when only that attribute of it is.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BINDERS = frozenset({"globals", "locals", "vars", "exec", "eval", "setattr", "__import__"})
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, *_COMPREHENSIONS)


@dataclass
class Reads:
    """The global names that a statement reads.

    Attributes:
        now: reads while the statement runs: decorators, defaults, bases, class bodies, calls.
        later: reads in the bodies of functions that it creates.
        binds: module-level names that it binds or deletes.
        mutates: names whose object it may change without binding the name.
        stars: modules of its `from x import *`, as (level, module).
        inner_imports: imports in function bodies, as (level, module, name or None).
        attributes: attributes of module-level names that it sets, as (name, attribute).
        handed_on: names that a bare call only hands on, as `atexit.register(f)` does with f.
        is_dynamic: it may bind names that the syntax does not show, as by `globals()`.
    """

    now: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)
    binds: set[str] = field(default_factory=set)
    mutates: set[str] = field(default_factory=set)
    stars: list[tuple[int, str]] = field(default_factory=list)
    inner_imports: list[tuple[int, str, str | None]] = field(default_factory=list)
    attributes: set[tuple[str, str]] = field(default_factory=set)
    handed_on: set[str] = field(default_factory=set)
    is_dynamic: bool = False


_MAX_DEPTH = 100_000  # the compiler takes nested expressions that are deeper than the usual limit


def deep(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let a function that walks syntax trees recurse as deep as these go."""

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, _MAX_DEPTH))
        try:
            return function(*args, **kwargs)
        finally:
            sys.setrecursionlimit(limit)

    return call


@deep
def reads_of(statement: ast.stmt) -> Reads:
    """Collect the reads of one module-level statement."""
    visitor = _Visitor()
    visitor.visit(statement)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        visitor.reads.handed_on = _handed_on(statement.value)
    return visitor.reads


def _handed_on(call: ast.Call) -> set[str]:
    """The names that stand as arguments of calls and nowhere else."""
    arguments = [
        node
        for inner in ast.walk(call)
        if isinstance(inner, ast.Call)
        for node in (*inner.args, *(keyword.value for keyword in inner.keywords))
        if isinstance(node, ast.Name)
    ]
    elsewhere = {
        node.id for node in ast.walk(call) if isinstance(node, ast.Name) and not any(node is a for a in arguments)
    }
    return {node.id for node in arguments} - elsewhere


@deep
def shape_of(node: ast.AST) -> str:
    """The syntax without positions: equal for nodes that mean the same."""
    return ast.dump(node)


def dotted(node: ast.expr) -> str | None:
    """The dotted name that `node` spells, or None."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def root(read: str) -> str:
    """The first name of a dotted read."""
    return read.partition(".")[0]


class _Scope:
    """One function or class scope: its own names hide the module's."""

    def __init__(self, is_function: bool) -> None:
        self.is_function = is_function
        self.own: set[str] = set()


class _Visitor(ast.NodeVisitor):
    def __init__(self) -> None:
        self.reads = Reads()
        self._scopes: list[_Scope] = []

    # What a name means here
    def _is_hidden(self, name: str) -> bool:
        return any(name in scope.own for scope in self._scopes if scope.is_function)

    def _read(self, read: str) -> None:
        if self._is_hidden(root(read)):
            return
        later = any(scope.is_function for scope in self._scopes)
        (self.reads.later if later else self.reads.now).add(read)

    def _bind(self, name: str) -> None:
        if not self._scopes:
            self.reads.binds.add(name)

    def _at_import(self) -> bool:
        return not any(scope.is_function for scope in self._scopes)

    def _mutate(self, node: ast.expr) -> None:
        while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            node = node.value
        if isinstance(node, ast.Name) and self._at_import() and not self._is_hidden(node.id):
            self.reads.mutates.add(node.id)

    # Expressions
    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._read(node.id)
            if node.id in _BINDERS and not self._scopes:
                self.reads.is_dynamic = True
        else:
            self._bind(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._mutate(node)
            if isinstance(node.value, ast.Name) and self._at_import() and not self._is_hidden(node.value.id):
                self.reads.attributes.add((node.value.id, node.attr))
        name = dotted(node)
        if name is None:
            self.visit(node.value)
        else:
            self._read(name)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._mutate(node)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._mutate(node.target)
        if isinstance(node.target, ast.Name):
            self._read(node.target.id)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            self._mutate(node.func.value)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        # A bare call is made for its effect, which may be on what it is given.
        if isinstance(node.value, ast.Call):
            for argument in (*node.value.args, *(k.value for k in node.value.keywords)):
                self._mutate(argument)
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._comprehension(node)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._comprehension(node)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._comprehension(node)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        own = {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
        hidden = Reads()
        inner = _Visitor()
        inner.reads = hidden
        inner._scopes = list(self._scopes)
        for child in ast.iter_child_nodes(node):
            inner.visit(child)
        self.reads.now |= {read for read in hidden.now if root(read) not in own}
        self.reads.later |= {read for read in hidden.later if root(read) not in own}
        self.reads.mutates |= hidden.mutates - own
        self.reads.binds |= hidden.binds - own

    # Definitions
    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._function(node)

    def _function(self, node: FunctionNode) -> None:
        if not isinstance(node, ast.Lambda):
            self._bind(node.name)
            for decorator in node.decorator_list:
                self._decorator(decorator)
            if node.returns is not None:
                self.visit(node.returns)
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)):
            self.visit(default)
        for argument in _arguments(node.args):
            if argument.annotation is not None:
                self.visit(argument.annotation)
        scope = _Scope(is_function=True)
        scope.own = local_names(node)
        self._scopes.append(scope)
        for child in _body(node):
            self.visit(child)
        self._scopes.pop()

    def _decorator(self, node: ast.expr) -> None:
        target = node.func if isinstance(node, ast.Call) else node
        if isinstance(target, ast.Attribute):
            self._mutate(target.value)
        self.visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._bind(node.name)
        for decorator in node.decorator_list:
            self._decorator(decorator)
        for child in (*node.bases, *node.keywords):
            self.visit(child)
        self._scopes.append(_Scope(is_function=False))
        for statement in node.body:
            self.visit(statement)
        self._scopes.pop()

    # Statements that bind
    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._bind(alias.asname or root(alias.name))
            if not self._at_import():
                self.reads.inner_imports.append((0, alias.name, None))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name == "*":
                self.reads.stars.append((node.level, node.module or ""))
            else:
                self._bind(alias.asname or alias.name)
            if not self._at_import():
                self.reads.inner_imports.append((node.level, node.module or "", alias.name))

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self._bind(node.name)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        if node.name:
            self._bind(node.name)
        self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name:
            self._bind(node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        if node.rest:
            self._bind(node.rest)
        self.generic_visit(node)


def local_names(node: FunctionNode) -> set[str]:
    """The names that a function binds for itself: its arguments and what its body stores."""
    body = _body(node)
    return ({argument.arg for argument in _arguments(node.args)} | _stored(body)) - _declared_global(body)


def _body(node: FunctionNode) -> list[ast.stmt] | list[ast.expr]:
    return [node.body] if isinstance(node, ast.Lambda) else node.body


def _arguments(args: ast.arguments) -> list[ast.arg]:
    extra = [arg for arg in (args.vararg, args.kwarg) if arg is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *extra]


def _own_nodes(body: list[ast.stmt] | list[ast.expr]) -> list[ast.AST]:
    """All nodes of a function body that belong to its own scope."""
    found: list[ast.AST] = []
    todo: list[ast.AST] = list(body)
    while todo:
        node = todo.pop()
        found.append(node)
        if not isinstance(node, _SCOPES):
            todo.extend(ast.iter_child_nodes(node))
    return found


def _stored(body: list[ast.stmt] | list[ast.expr]) -> set[str]:
    names: set[str] = set()
    for node in _own_nodes(body):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or root(alias.name) for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return names


def _declared_global(body: list[ast.stmt] | list[ast.expr]) -> set[str]:
    return {name for node in _own_nodes(body) if isinstance(node, ast.Global) for name in node.names}
