"""Running a definition that stands inside of a function again, with the values of an earlier call."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from inspect import CO_OPTIMIZED
from types import CellType, CodeType, FunctionType
from typing import Any

from tokenspeed_reload.codes import FUTURE_FLAGS, CodeMap, nested, never
from tokenspeed_reload.definitions import Definitions
from tokenspeed_reload.nested import Nested
from tokenspeed_reload.scopes import FunctionNode

_OUTERMOST = "cells"
_NO_PARAMETERS: dict[str, Any] = {"type_params": []} if sys.version_info >= (3, 12) else {}
Cells = dict[str, CellType]


class Maker:
    """The function around a definition, cut down to what makes it.

    Code that it makes equals that of the whole module: names, lines and free variables are the same.

    Args:
        definition: what to make.
        module: the new source that it stands in.
        codes: the code of the module before and after.
    """

    def __init__(self, definition: Nested, module: Definitions, codes: CodeMap) -> None:
        self._definition = definition
        self._module = module
        self._codes = codes

    def run(
        self, statements: Iterable[ast.stmt], result: ast.expr, cells: Mapping[str, CellType], namespace: dict[str, Any]
    ) -> Any:
        """Run `statements` and return what `result` gives; free variables are found in `cells`.

        Raises:
            LookupError: the code that it makes would not be that of the module, so that later edits could not follow.
        """
        code = self.code(statements, result, cells)
        if not all(map(self._is_known, nested(code))):
            raise LookupError("its code stands otherwise in the module")
        closure = tuple(cells[name] for name in code.co_freevars)
        return FunctionType(code, namespace, code.co_name, None, closure)()

    def _is_known(self, code: CodeType) -> bool:
        """True for code of the module; of a class body, which may be cut down, the functions count."""
        return self._codes.is_new(code) if code.co_flags & CO_OPTIMIZED else all(map(self._is_known, nested(code)))

    def code(self, statements: Iterable[ast.stmt], result: ast.expr, names: Iterable[str]) -> CodeType:
        """The code of the innermost function, whose free variables are among `names`."""
        body: list[ast.stmt] = [*statements, ast.Return(value=result)]
        path: list[str] = []
        for node in reversed(self._definition.around):
            name = getattr(node, "name", "lambda_")
            path.insert(0, name)
            body = [class_statement(name, body) if isinstance(node, ast.ClassDef) else _function(name, [], body)]
        # A name that is global has no function around it in its qualified name.
        outermost = _function(_OUTERMOST, names, [ast.Global([path[0]]), *body])
        imports = [s.node for s in self._module.statements if s.kind == "import"]
        tree = ast.Module(body=[*never(imports), outermost], type_ignores=[])
        ast.fix_missing_locations(tree)
        path_of = self._module.source.path
        code = compile(tree, path_of, "exec", flags=self._codes.flags & FUTURE_FLAGS, dont_inherit=True)
        for name in (_OUTERMOST, *path):
            code = next(inner for inner in nested(code) if inner.co_name == name)
        return code


def _function(name: str, parameters: Iterable[str], body: list[ast.stmt]) -> ast.FunctionDef:
    arguments = ast.arguments(
        posonlyargs=[],
        args=[ast.arg(parameter) for parameter in sorted(parameters)],
        kwonlyargs=[],
        kw_defaults=[],
        defaults=[],
    )
    return ast.FunctionDef(name, arguments, body, [], **_NO_PARAMETERS)


def class_statement(name: str, body: list[ast.stmt], like: ast.ClassDef | None = None) -> ast.ClassDef:
    """A class with this body; `like` gives its type parameters and its place."""
    parameters: dict[str, Any] = {name: getattr(like, name, []) for name in _NO_PARAMETERS}
    node = ast.ClassDef(name, [], [], body, [], **parameters)
    return ast.copy_location(node, like) if like is not None else node


def defaults_of(node: FunctionNode) -> dict[str, ast.expr]:
    """The default of each parameter that has one."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = positional[len(positional) - len(arguments.defaults) :]
    found = {a.arg: default for a, default in zip(with_default, arguments.defaults, strict=True)}
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return found | {a.arg: default for a, default in pairs if default is not None}


def annotations_of(node: FunctionNode) -> dict[str, ast.expr]:
    """The annotation of each parameter that has one, and that of the result under "return"."""
    if isinstance(node, ast.Lambda):
        return {}
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    found = {a.arg: a.annotation for a in every if a is not None and a.annotation is not None}
    return found | ({"return": node.returns} if node.returns is not None else {})
