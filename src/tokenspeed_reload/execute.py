"""The execution of one module's changed statements in its live namespace."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from tokenspeed_reload.codes import never
from tokenspeed_reload.lookups import root
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.undo import MISSING


def execute(module: ModuleInputs, namespace: dict[str, Any]) -> None:
    """Run the statements of `module` that are due, in source order.

    Names that the new version does not bind are gone while it runs, and so are those that it may no longer bind
    or would read before it binds them: code that a fresh interpreter refuses fails here too.
    """
    for name in module.removed | module.cleared:
        namespace.pop(name, None)
    early = {name: namespace.pop(name) for name in _read_before_bound(module) if name in namespace}
    if module.old.has_docstring and not module.new.has_docstring:
        namespace["__doc__"] = None
    for name in module.unannotated:
        namespace.get("__annotations__", {}).pop(name, None)
    body = _body(module)
    if body:
        tree = ast.Module(body=body, type_ignores=[])
        exec(compile(tree, module.new.source.path, "exec", dont_inherit=True), namespace)
    for name, value in early.items():
        if namespace.get(name, MISSING) is MISSING and name not in module.rebuilt:
            namespace[name] = value


def _body(module: ModuleInputs) -> list[ast.stmt]:
    """The statements to run, with what the compiler has to see before them.

    The compiler emits other code for `a.b()` when it sees that `a` is imported. Imports that are not due are
    therefore compiled too, in a block that never runs: code is then equal to that of the whole module.
    """
    due = [s for s in module.statements() if s.kind != "future" and not s.is_text]
    annotated = [s for s in module.new.statements if id(s) in module.annotated - module.run]
    docstring = module.new.statements[:1] if module.new.has_docstring else []
    before = module.old.statements[:1] if module.old.has_docstring else []
    if not due and not annotated and [s.shape for s in docstring] == [s.shape for s in before]:
        return []
    running = {id(s) for s in (*docstring, *due)}
    futures = [s.node for s in module.new.statements if s.kind == "future"]
    rest = [
        s.node
        for s in module.new.statements
        if s.kind != "future" and id(s) not in running and (s.kind == "import" or _imports(s.node))
    ]
    last = {id(s): s.node for s in due} | {id(s): _annotation(s.node) for s in annotated}
    body = [last[id(s)] for s in module.new.statements if id(s) in last]
    return [*(s.node for s in docstring), *futures, *never(rest), *body]


def _annotation(node: ast.stmt) -> ast.stmt:
    """The annotation of a value without its assignment; nothing where there is none."""
    if not isinstance(node, ast.AnnAssign):
        return ast.copy_location(ast.Pass(), node)
    return ast.copy_location(ast.AnnAssign(node.target, node.annotation, None, node.simple), node)


def _imports(node: ast.stmt) -> bool:
    """True when a statement, such as `try`, imports at the level of the module."""
    todo: list[ast.AST] = [node]
    while todo:
        inner = todo.pop()
        if isinstance(inner, ast.Import | ast.ImportFrom):
            return True
        if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            todo.extend(ast.iter_child_nodes(inner))
    return False


def _read_before_bound(module: ModuleInputs) -> set[str]:
    first: dict[str, int] = {}
    later: dict[str, set[str]] = {}
    for index, statement in enumerate(module.new.statements):
        for name in statement.reads.binds:
            first.setdefault(name, index)
            later.setdefault(name, set()).update(map(root, statement.reads.later))
    early: set[str] = set()
    for index, statement in enumerate(module.new.statements):
        if id(statement) in module.run:
            reads = _reached(map(root, statement.reads.now), later)
            early |= {name for name in reads if first.get(name, -1) >= index}
    return early


def _reached(names: Iterable[str], later: dict[str, set[str]]) -> set[str]:
    """The names that are read at once, and those that the functions among them read when called."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo.extend(later.get(name, ()))
    return found
