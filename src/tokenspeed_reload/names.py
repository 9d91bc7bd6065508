"""Which names a piece of syntax reads, and when.

A read is a dotted string: "x" when the object itself is used, "x.y.z" when only that attribute of it is. Its first
part may also name a module, as `lookups` tells.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from tokenspeed_reload.lookups import (
    ANY_MODULE,
    MODULE_PATH,
    OWN_NAMES,
    SCOPE_NAMES,
    is_namespace,
    is_writer,
    module_in,
    rest_of,
    root,
    spell,
)
from tokenspeed_reload.scopes import FunctionNode, Scope, arguments_of, body_of, local_names

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_BINDERS = frozenset({"globals", "locals", "vars", "exec", "eval", "setattr", "__import__"})


@dataclass
class Reads:
    """The global names that a statement reads.

    Attributes:
        now: reads while the statement runs: decorators, defaults, bases, class bodies, calls.
        later: reads in the bodies of functions that it creates.
        binds: module-level names that it binds or deletes.
        imports: those of them that an import binds, in a block as well.
        mutates: names whose object it may change without binding the name.
        stars: modules of its `from x import *`, as (level, module).
        taken: what a `from` import takes while the statement runs, as (level, module, name).
        inner_imports: imports in function bodies, as (level, module, name or None).
        attributes: attributes of module-level names that it sets, as (name, attribute).
        handed_on: names that a bare call only hands on, as `atexit.register(f)` does with f.
        is_dynamic: it may bind names that the syntax does not show, as by `globals()`.
        sets_later: functions that it creates may do so when they are called.
        paths_now: texts given to calls that may name a module, or something in one: `load("k")`, `resolve("k:C")`.
        paths_later: such texts in the bodies of functions that it creates.
        named: the attributes that it reads of anything, and the texts that may name one.
    """

    now: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)
    binds: set[str] = field(default_factory=set)
    imports: set[str] = field(default_factory=set)
    mutates: set[str] = field(default_factory=set)
    stars: list[tuple[int, str]] = field(default_factory=list)
    taken: list[tuple[int, str, str]] = field(default_factory=list)
    inner_imports: list[tuple[int, str, str | None]] = field(default_factory=list)
    attributes: set[tuple[str, str]] = field(default_factory=set)
    handed_on: set[str] = field(default_factory=set)
    is_dynamic: bool = False
    sets_later: bool = False
    paths_now: set[str] = field(default_factory=set)
    paths_later: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)


_LONGEST_PATH = 200
_OWN_NAMESPACES = (f"{OWN_NAMES}.__dict__", f"{SCOPE_NAMES}.__dict__")
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


class _Visitor(ast.NodeVisitor):
    def __init__(self) -> None:
        self.reads = Reads()
        self._scopes: list[Scope] = []
        self._arguments = 0

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

    def _import(self, name: str) -> None:
        self._bind(name)
        if not self._scopes:
            self.reads.imports.add(name)

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
        self._add_names(node)
        if not self._look_up(node):
            self.visit(node.value)

    def _add_names(self, node: ast.expr) -> None:
        while isinstance(node, ast.Attribute):
            self.reads.named.add(node.attr)
            node = node.value

    def _look_up(self, node: ast.expr) -> bool:
        """Read what a name, or a text in the place of one, stands for; False when `node` is neither."""
        read = spell(node)
        if read is None:
            return False
        for part in rest_of(node):
            self._argument(part)
        whole = read.removesuffix(".__dict__") if is_namespace(read) else read
        if root(whole) == SCOPE_NAMES:
            if self._scopes:
                return True
            whole = OWN_NAMES if whole == SCOPE_NAMES else whole.removeprefix(f"{SCOPE_NAMES}.")
        if whole == OWN_NAMES and not self._scopes:
            self.reads.is_dynamic = True
        self._read(whole)
        return True

    def _argument(self, node: ast.AST) -> None:
        """Visit what is given to a call or stands as a key, where a text may name something."""
        self._arguments += 1
        self.visit(node)
        self._arguments -= 1

    def visit_Constant(self, node: ast.Constant) -> None:
        if self._arguments and isinstance(node.value, str) and len(node.value) < _LONGEST_PATH:
            text = node.value.strip()
            if MODULE_PATH.fullmatch(text):
                later = any(scope.is_function for scope in self._scopes)
                (self.reads.paths_later if later else self.reads.paths_now).add(text)
                self.reads.named.add(text)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.ctx, ast.Load):
            if not self._look_up(node):
                self.visit(node.value)
                self._argument(node.slice)
            return
        self._mutate(node)
        self._written(node.value)
        self.visit(node.slice)

    def _written(self, holder: ast.expr) -> None:
        """Visit what is written to; names that are set by their text, as in `globals()["x"] = 1`, are not read."""
        read = spell(holder)
        if read is None or (module_in(read) is None and root(read) not in (OWN_NAMES, SCOPE_NAMES)):
            self.visit(holder)
        elif self._scopes:
            self.reads.sets_later = True
        else:
            self.reads.is_dynamic = True

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._mutate(node.target)
        if isinstance(node.target, ast.Name):
            self._read(node.target.id)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            self._mutate(node.func.value)
        if self._look_up(node):
            return
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        match node.func:
            case ast.Attribute(value=holder) if is_writer(node.func):
                self._written(holder)
            case ast.Name(id="setattr" | "delattr") if arguments:
                self.visit(node.func)
                self._written(arguments.pop(0))
            case ast.Name(id="eval" | "exec") if arguments:
                self.visit(node.func)
                self._evaluated(arguments.pop(0))
                arguments = [a for a in arguments if spell(a) not in _OWN_NAMESPACES]
            case _:
                self.visit(node.func)
        for argument in arguments:
            self._argument(argument)

    def _evaluated(self, code: ast.expr) -> None:
        """Read what a text reads that is run; one that is not known may read anything."""
        text = code.value if isinstance(code, ast.Constant) else None
        try:
            tree = ast.parse(text) if isinstance(text, str) else None
        except (SyntaxError, ValueError):
            tree = None
        if tree is None:
            self.visit(code)
            self._read(OWN_NAMES)
            self._read(ANY_MODULE)
            return
        inner = self._inner()
        for statement in tree.body:
            inner.visit(statement)
        self._take_over(inner.reads, inner.reads.binds)

    def _inner(self) -> _Visitor:
        inner = _Visitor()
        inner._scopes = list(self._scopes)
        inner._arguments = self._arguments
        return inner

    def _take_over(self, hidden: Reads, own: set[str]) -> None:
        """Add what an inner scope reads of others than its `own` names."""
        self.reads.now |= {read for read in hidden.now if root(read) not in own}
        self.reads.later |= {read for read in hidden.later if root(read) not in own}
        self.reads.mutates |= hidden.mutates - own
        self.reads.paths_now |= hidden.paths_now
        self.reads.paths_later |= hidden.paths_later
        self.reads.named |= hidden.named

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
        inner = self._inner()
        for child in ast.iter_child_nodes(node):
            inner.visit(child)
        self._take_over(inner.reads, own)
        self.reads.binds |= inner.reads.binds - own

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
        for argument in arguments_of(node.args):
            if argument.annotation is not None:
                self.visit(argument.annotation)
        scope = Scope(is_function=True)
        scope.own = local_names(node)
        self._scopes.append(scope)
        for child in body_of(node):
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
        self._scopes.append(Scope(is_function=False))
        for statement in node.body:
            self.visit(statement)
        self._scopes.pop()

    # Statements that bind
    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._import(alias.asname or root(alias.name))
            if not self._at_import():
                self.reads.inner_imports.append((0, alias.name, None))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name == "*":
                self.reads.stars.append((node.level, node.module or ""))
            else:
                self._import(alias.asname or alias.name)
                if self._at_import():
                    self.reads.taken.append((node.level, node.module or "", alias.name))
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
