"""What names and conditions of the new sources will give, as far as that can be told before anything runs."""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from types import ModuleType
from typing import Any

from tokenspeed_reload.comparison import find_definition
from tokenspeed_reload.definitions import DEFINING, Statement
from tokenspeed_reload.dependencies import resolve
from tokenspeed_reload.merge import Merge
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.names import reads_of
from tokenspeed_reload.undo import MISSING
from tokenspeed_reload.values import is_a, is_atom

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Lookup = Callable[[ast.expr], Any]

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}


class Foreseen:
    """Reads the sources of the modules of a reload, and the live objects that stay."""

    def __init__(self, merge: Merge) -> None:
        self._modules = merge.inputs.modules

    # Objects
    def stands_for(self, module: ModuleInputs, name: str) -> Any:
        """The live object that a name will stand for, some other object if the module makes it; MISSING if unknown."""
        made = [s for s in module.new.statements if name in s.reads.binds]
        if not made:
            return self._from_star(module, name)
        if made[-1].kind in DEFINING:
            return made[-1]
        if made[-1].kind == "import":
            edge = module.edges[name]
            return self._stays_at(edge.gives if edge.name is None else edge.module, edge.name)
        alias = made[-1].value
        return self._stays_at(module.name, alias.id) if isinstance(alias, ast.Name) else MISSING

    def makes(self, module: ModuleInputs, name: str) -> ast.AST | None:
        """The definition for which an imported name will stand, if the reload makes it; else None."""
        edge = module.edges.get(name)
        provider = self._modules.get(edge.module) if edge is not None else None
        if edge is None or edge.name is None or provider is None or edge.name in provider.namespace:
            return None
        return find_definition(provider.new, edge.name)

    def starred(self, module: ModuleInputs) -> set[str]:
        """The names that the star imports which run again will give."""
        found: set[str] = set()
        for provider in [p for s in module.statements() for p in _star_providers(s, module)]:
            public = vars(provider).get("__all__", [n for n in vars(provider) if not n.startswith("_")])
            found |= set(public) if isinstance(public, list | tuple) else set()
        return found - module.new.binds

    def _from_star(self, module: ModuleInputs, name: str) -> Any:
        for provider in [p for s in reversed(module.new.statements) for p in _star_providers(s, module)]:
            if name in vars(provider):
                return self._stays_at(provider.__name__, name)
        return MISSING

    def _stays_at(self, home: str, name: str | None) -> Any:
        """What a module has under a name before the reload and after it; MISSING if that cannot be told."""
        if name is None or f"{home}.{name}" in sys.modules:
            return sys.modules.get(home if name is None else f"{home}.{name}", MISSING)
        provider = self._modules.get(home)
        stays = provider is None or name not in provider.dirty or provider.new.kinds_of(name) <= DEFINING
        return vars(sys.modules[home]).get(name, MISSING) if stays and home in sys.modules else MISSING

    # Conditions
    def chosen(
        self, module: ModuleInputs, body: Iterable[ast.stmt], *, is_new: bool, hidden: Collection[str] = ()
    ) -> Iterator[ast.stmt]:
        """The statements of a body that run, before or after; both branches where a condition cannot be told.

        Args:
            module: the module in which it stands.
            body: the statements.
            is_new: after the reload, and not before it.
            hidden: names that stand for other things in the body than in the module.
        """
        return _chosen(body, lambda test: self._value(module, test, is_new, hidden))

    def classes(self, module: ModuleInputs, *, is_new: bool = True) -> dict[str, ast.ClassDef]:
        """The class statements of a module that run again, by name; without `is_new` those that ran before."""
        statements = module.statements() if is_new else module.old.statements
        nodes = self.chosen(module, [s.node for s in statements], is_new=is_new)
        return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}

    def switched(self, module: ModuleInputs) -> set[str]:
        """The functions, by qualified name, for which another one of several definitions holds."""
        old = self._functions(module, [s.node for s in module.old.statements], is_new=False)
        new = self._functions(module, [s.node for s in module.statements()], is_new=True)
        plain = {name for name in new if name in old and not new[name].decorator_list + old[name].decorator_list}
        return {name for name in plain if ast.dump(new[name]) != ast.dump(old[name])}

    def _functions(
        self, module: ModuleInputs, body: list[ast.stmt], prefix: str = "", *, is_new: bool
    ) -> dict[str, FunctionNode]:
        found: dict[str, FunctionNode] = {}
        hidden = {name for s in body for name in reads_of(s).binds} if prefix else set()
        for node in self.chosen(module, body, is_new=is_new, hidden=hidden):
            if isinstance(node, FunctionNode):
                found[prefix + node.name] = node
            elif isinstance(node, ast.ClassDef):
                found |= self._functions(module, node.body, f"{prefix}{node.name}.", is_new=is_new)
        return found

    def _value(self, module: ModuleInputs, node: ast.expr, is_new: bool, hidden: Collection[str]) -> Any:
        """The value of a condition, or of a part of one; MISSING if it cannot be told."""

        def value(part: ast.expr) -> Any:
            return self._value(module, part, is_new, hidden)

        match node:
            case ast.Constant():
                return node.value
            case ast.Tuple():
                parts = tuple(map(value, node.elts))
                return MISSING if MISSING in parts else parts
            case ast.UnaryOp(op=ast.Not()):
                inner = value(node.operand)
                return MISSING if inner is MISSING else not inner
            case ast.BoolOp():
                return _combined(node, list(map(value, node.values)))
            case ast.Compare():
                return _compared(node, list(map(value, [node.left, *node.comparators])))
            case ast.Name():
                return MISSING if node.id in hidden else self._constant(module, node.id, is_new)
            case ast.Attribute(value=ast.Name(id=name)) if name not in hidden:
                return self._member(module, name, node.attr, is_new)
        return MISSING

    def _constant(self, module: ModuleInputs, name: str, is_new: bool) -> Any:
        """The constant that a name stands for."""
        if is_new and name in module.dirty:
            made = [s for s in module.new.statements if name in s.reads.binds]
            if len(made) != 1:
                return MISSING
            edge = module.edges.get(name)
            if made[0].kind == "import" and edge is not None and edge.name is not None:
                return self._constant_at(edge.module, edge.name)
            value = made[0].value
            return value.value if isinstance(value, ast.Constant) else MISSING
        return _atom(module.namespace.get(name, MISSING))

    def _constant_at(self, home: str, name: str) -> Any:
        provider = self._modules.get(home)
        if provider is not None:
            return self._constant(provider, name, is_new=True)
        live = sys.modules.get(home)
        return _atom(vars(live).get(name, MISSING)) if is_a(live, ModuleType) else MISSING

    def _member(self, module: ModuleInputs, name: str, attribute: str, is_new: bool) -> Any:
        """The constant that an attribute of a module is."""
        edge = module.edges.get(name)
        if edge is None or edge.name is not None:
            return MISSING
        if is_new:
            return self._constant_at(edge.gives, attribute)
        live = sys.modules.get(edge.gives)
        return _atom(vars(live).get(attribute, MISSING)) if is_a(live, ModuleType) else MISSING


def _star_providers(statement: Statement, module: ModuleInputs) -> Iterator[ModuleType]:
    for level, name in statement.reads.stars:
        provider: Any = sys.modules.get(resolve(level, name, module.package))
        if is_a(provider, ModuleType):
            yield provider


def _chosen(body: Iterable[ast.stmt], value: Lookup) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If):
            told = value(node.test)
            branches = [node.body, node.orelse] if told is MISSING else [node.body if told else node.orelse]
            for branch in branches:
                yield from _chosen(branch, value)
        elif isinstance(node, ast.Try | ast.With):
            yield from _chosen((n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)), value)
        else:
            yield node


def _combined(node: ast.BoolOp, values: list[Any]) -> Any:
    decides = isinstance(node.op, ast.Or)
    for value in values:
        if value is MISSING or bool(value) is decides:
            return value
    return values[-1]


def _compared(node: ast.Compare, values: list[Any]) -> Any:
    if MISSING in values:
        return MISSING
    try:
        pairs = zip(node.ops, values, values[1:], strict=False)
        return all(_COMPARISONS[type(op)](left, right) for op, left, right in pairs)
    except TypeError:
        return MISSING


def _atom(value: Any) -> Any:
    """A constant; that of `sys.version_info` too."""
    if value is sys.version_info:
        return tuple(value)
    return value if is_atom(value) else MISSING
