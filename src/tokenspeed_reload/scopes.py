"""The names that belong to a function or class rather than to its module."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from tokenspeed_reload.lookups import root

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, *_COMPREHENSIONS)


class Scope:
    """One function or class scope: its own names hide the module's."""

    def __init__(self, is_function: bool) -> None:
        self.is_function = is_function
        self.own: set[str] = set()


def local_names(node: FunctionNode) -> set[str]:
    """The names that a function binds for itself: its arguments and what its body stores."""
    body = body_of(node)
    return ({argument.arg for argument in arguments_of(node.args)} | _stored(body)) - _declared_global(body)


def body_of(node: FunctionNode) -> list[ast.stmt] | list[ast.expr]:
    """The statements of a function, or the expression of a lambda."""
    return [node.body] if isinstance(node, ast.Lambda) else node.body


def arguments_of(args: ast.arguments) -> list[ast.arg]:
    """All parameters of a function."""
    extra = [arg for arg in (args.vararg, args.kwarg) if arg is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *extra]


def own_nodes(body: Sequence[ast.AST]) -> list[ast.AST]:
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
    for node in own_nodes(body):
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
    return {name for node in own_nodes(body) if isinstance(node, ast.Global) for name in node.names}
