"""Objects of modules that are not recorded, as far as a module names them: what it writes to them is told."""

from __future__ import annotations

import ast
import sys
from collections.abc import Container, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from tokenspeed_reload.dependencies import ImportEdge, home_of
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.names import dotted
from tokenspeed_reload.undo import MISSING, elements_of, items_of
from tokenspeed_reload.values import attributes_of, is_a, module_name

_WRITERS = frozenset({"setattr", "delattr"})
_ROOMS = (list, dict, set)
_MADE_BY_READING = frozenset({"__annotations__", "__warningregistry__"})


class Foreign:
    """What a module can reach by the dotted names in its source: modules, classes, functions, instances, containers.

    Args:
        module: the module, before it runs.
        recorded: names of the modules that an undo covers.
    """

    def __init__(self, module: ModuleInputs, recorded: Container[str]) -> None:
        self._module = module
        self._recorded = recorded
        self._edges = {name: edge for name, edge in module.edges.items() if self._is_foreign(edge)}
        self._late = {name for name, edge in self._edges.items() if edge.module not in sys.modules}
        self._seen: dict[int, tuple[str, Any, dict[Any, Any]]] = {}
        self._stored = {
            n.attr
            for s in module.new.statements
            for n in ast.walk(s.node)
            if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load)
        }
        if module.run:
            self._take()

    def is_root(self, name: str) -> bool:
        """True for a name that an import of a foreign module binds."""
        return name in self._edges

    def written(self, besides: Iterable[str]) -> list[str]:
        """What was written, as sentences without a subject; what the dotted names `besides` did is told elsewhere."""
        told = [f"{self._whole(name)}." for name in besides]
        found = []
        for name, value, before in self._seen.values():
            if f"{name}.".startswith(tuple(told)):
                continue
            now = _state(value)
            keys = [key for key in {**before, **now} if before.get(key, MISSING) is not now.get(key, MISSING)]
            if is_a(value, ModuleType | FunctionType | type):
                set_here = [key for key in keys if key in before or key in self._stored or not _is_lazy(now[key], name)]
                found += [f"it set {name}.{key}" for key in set_here if key not in _MADE_BY_READING]
            elif keys:
                told.append(f"{name}.")
                found.append(f"it wrote to {name}")
        return found + [f"line {line} wrote to {what}" for line, what in self._late_writes()]

    def _is_foreign(self, edge: ImportEdge) -> bool:
        return edge.module not in self._recorded and f"{edge.module}.{edge.name}" not in self._recorded

    def _take(self) -> None:
        names = {n for s in self._module.new.statements for node in ast.walk(s.node) if (n := _spelled(node))}
        for name in sorted(names):
            root, *rest = name.split(".")
            for whole, value in self._along(root, rest):
                if value is not sys.modules and id(value) not in self._seen:
                    self._seen[id(value)] = (whole, value, _state(value))

    def _along(self, root: str, rest: list[str]) -> Iterator[tuple[str, Any]]:
        """The objects that a dotted name stands for on its way, each with its whole name."""
        whole, value = self._first(root)
        for part in [*rest, None]:
            if value is MISSING or (is_a(value, ModuleType) and module_name(value) in self._recorded):
                return
            if is_a(value, FunctionType | type) and home_of(value) in self._recorded:
                return
            yield whole, value
            if part is not None:
                whole, value = f"{whole}.{part}", _attribute(value, part)

    def _whole(self, name: str) -> str:
        root, dot, rest = name.partition(".")
        return f"{self._first(root)[0]}{dot}{rest}"

    def _first(self, root: str) -> tuple[str, Any]:
        edge = self._edges.get(root)
        if edge is None:
            value = self._module.namespace.get(root, MISSING)
            return (module_name(value), value) if is_a(value, ModuleType) else (root, MISSING)
        if edge.name is None:
            return edge.gives, sys.modules.get(edge.gives, MISSING)
        whole = f"{edge.module}.{edge.name}"
        home = sys.modules.get(edge.module, MISSING)
        return whole, sys.modules.get(whole, _attribute(home, edge.name))

    def _late_writes(self) -> Iterator[tuple[int, str]]:
        """What the statements themselves write to modules that were not loaded before."""
        for statement in self._module.statements():
            for node in outer(statement.node):
                written = node.target if isinstance(node, ast.AugAssign) else node
                is_place = isinstance(written, ast.Attribute | ast.Subscript) and not isinstance(written.ctx, ast.Load)
                if isinstance(written, ast.expr) and (is_place or written is not node):
                    root: ast.expr = written
                    while isinstance(root, ast.Attribute | ast.Subscript):
                        root = root.value
                    if isinstance(root, ast.Name) and root.id in self._late:
                        yield written.lineno, ast.unparse(written)


def outer(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a statement that run with it: all but the bodies of functions."""
    todo = [node]
    while todo:
        part = todo.pop()
        yield part
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += [*part.decorator_list, *part.args.defaults, *(d for d in part.args.kw_defaults if d)]
        elif not isinstance(part, ast.Lambda):
            todo += ast.iter_child_nodes(part)


def target_of(call: ast.Call) -> ast.expr:
    """What a call acts upon: the first argument of `setattr`, else the function itself."""
    is_writer = isinstance(call.func, ast.Name) and call.func.id in _WRITERS and call.args
    return call.args[0] if is_writer else call.func


def _spelled(node: ast.AST) -> str | None:
    return dotted(node) if isinstance(node, ast.Attribute | ast.Name) else None


def _attribute(value: Any, name: str) -> Any:
    """An attribute as it stands in a namespace, without calling anything."""
    for holder in value.__mro__ if is_a(value, type) else (value,):
        found = _namespace(holder).get(name, MISSING)
        if found is not MISSING:
            return found
    return MISSING


def _namespace(value: Any) -> dict[str, Any]:
    if is_a(value, type):
        return dict(value.__dict__)
    return attributes_of(value) or {}


def _state(value: Any) -> dict[Any, Any]:
    """What can be compared of an object: members, elements, attributes and what containers among these hold."""
    kind = type(value)
    if kind is dict:
        return {id(key): item for key, item in items_of(value)}
    if kind in _ROOMS:
        return dict(enumerate(elements_of(value))) if kind is list else {id(item): item for item in elements_of(value)}
    state: dict[Any, Any] = dict(_namespace(value))
    if not is_a(value, ModuleType | FunctionType | type):
        for name, held in list(state.items()):
            if type(held) in _ROOMS:
                state |= {(name, key): item for key, item in _state(held).items()}
    return state


def _is_lazy(value: Any, name: str) -> bool:
    """True for what a package loads or makes by itself when it is asked for it."""
    home = home_of(value) if is_a(value, ModuleType | FunctionType | type) else type(value).__module__
    return home is not None and home.partition(".")[0] == name.partition(".")[0]
