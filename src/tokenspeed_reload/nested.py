"""Definitions inside of functions: which of them an edit changes in more than their code."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType

from tokenspeed_reload.inputs import Inputs
from tokenspeed_reload.lookups import root
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.names import dotted, reads_of, shape_of
from tokenspeed_reload.scopes import FunctionNode, local_names, own_nodes

Node = FunctionNode | ast.ClassDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


@dataclass(frozen=True)
class Nested:
    """A function or class that a function defines when it is called.

    Attributes:
        node: its definition.
        qualname: its qualified name, as Python spells it.
        around: the definitions around it, the outermost first.
    """

    node: Node
    qualname: str
    around: tuple[Node, ...]

    @property
    def is_member(self) -> bool:
        """True when it stands in the body of a class."""
        return isinstance(self.around[-1], ast.ClassDef)

    @property
    def outer_names(self) -> set[str]:
        """The names that the functions around it bind, which it may read."""
        return {name for node in self.around if isinstance(node, _FUNCTIONS) for name in local_names(node)}

    def is_bound_once(self, name: str) -> bool:
        """True when a call of the function around it that binds `name` does so at one place, once."""
        for node in reversed(self.around):
            if isinstance(node, _FUNCTIONS) and name in local_names(node):
                return _bindings(node, name) == 1
        return False

    def imports_of(self, names: set[str]) -> dict[str, ast.stmt]:
        """Those of `names` that the function right around it binds by an import alone, with the statement."""
        inner = self.around[-1]
        if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            return {}
        found: dict[str, ast.stmt] = {}
        for node in own_nodes(inner.body):
            if isinstance(node, ast.Import | ast.ImportFrom):
                found |= dict.fromkeys(names & reads_of(node).binds, node)
        return {name: node for name, node in found.items() if self.is_bound_once(name)}


def outer_reads(node: ast.stmt | ast.expr, nested: Nested) -> tuple[set[str], set[str]]:
    """The names of functions around `nested` that `node` reads when it runs, and those that its functions read."""
    reads = reads_of(ast.Expr(node) if isinstance(node, ast.expr) else node)
    outer = nested.outer_names
    return {root(r) for r in reads.now} & outer, {root(r) for r in reads.later} & outer


def nested_in(statement: ast.stmt) -> list[Nested]:
    """All definitions of a module-level statement that stand inside of a function."""
    found: list[Nested] = []
    todo: list[tuple[ast.AST, str, tuple[Node, ...]]] = [(statement, "", ())]
    while todo:
        node, prefix, around = todo.pop()
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            todo.extend((child, prefix, around) for child in ast.iter_child_nodes(node))
            continue
        qualname = prefix + getattr(node, "name", "<lambda>")
        if any(isinstance(outer, _FUNCTIONS) for outer in around):
            found.append(Nested(node, qualname, around))
        body: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else list(node.body)
        own = {id(child) for child in body}
        todo.extend((child, prefix, around) for child in ast.iter_child_nodes(node) if id(child) not in own)
        inside = f"{qualname}." if isinstance(node, ast.ClassDef) else f"{qualname}.<locals>."
        todo.extend((child, inside, (*around, node)) for child in body)
    return found


def outline(node: Node) -> str:
    """The syntax of a definition without the bodies of its functions: what runs where it is defined."""
    if isinstance(node, ast.Lambda):
        return shape_of(node.args)
    parts = [type(node).__name__, node.name, *(shape_of(d) for d in node.decorator_list)]
    parts += [shape_of(p) for p in getattr(node, "type_params", ())]
    if isinstance(node, ast.ClassDef):
        parts += [shape_of(part) for part in (*node.bases, *node.keywords)]
        parts += [outline(s) if isinstance(s, (*_FUNCTIONS, ast.ClassDef)) else shape_of(s) for s in node.body]
    else:
        parts += [shape_of(node.args), shape_of(node.returns) if node.returns is not None else ""]
        parts.append(repr(ast.get_docstring(node, clean=False)))
    return "\n".join(parts)


def read_at_definition(node: Node) -> set[str]:
    """What is read where a definition runs, apart from what its decorators read."""
    if isinstance(node, ast.ClassDef):
        return reads_of(node).now
    return {read for part in signature_parts(node) for read in reads_of(ast.Expr(part)).now}


def signature_parts(node: FunctionNode) -> list[ast.expr]:
    """The defaults and annotations of a function."""
    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg)
    annotations = [a.annotation for a in arguments if a is not None]
    returns = None if isinstance(node, ast.Lambda) else node.returns
    parts = [*node.args.defaults, *node.args.kw_defaults, *annotations, returns]
    return [part for part in parts if part is not None]


class NestedVersions:
    """The nested definitions of what changed in a module, before and after."""

    def __init__(self, module: ModuleInputs, inputs: Inputs) -> None:
        self.module = module
        self._inputs = inputs
        added = [s.node for s in module.new.statements if id(s) in module.added]
        stay = [s.node for s in module.new.statements if id(s) not in module.added and s.reads.binds & module.dirty]
        before, after = [*(s.node for s in module.dropped), *stay], [*added, *stay]
        self.old = [n for node in before for n in nested_in(node)]
        self.new = [n for node in after for n in nested_in(node)]
        self._by_name: defaultdict[str, tuple[list[Nested], list[Nested]]] = defaultdict(lambda: ([], []))
        for side, version in enumerate((self.old, self.new)):
            for nested in version:
                self._by_name[nested.qualname][side].append(nested)

        functions = [[node for s in side for node in _functions_in(s)] for side in (before, after)]
        self._calls = [Counter(call for f in side for call in _class_calls(f)) for side in functions]
        self._makes_other = [
            c for f in functions[1] for c in _calls(f) if _names_class(c) and self._is_dirty_call(c, f)
        ]

    @property
    def is_due(self) -> bool:
        """True when some definition changed in more than the code of functions."""
        outlines = [Counter((n.qualname, outline(n.node)) for n in version) for version in (self.old, self.new)]
        changed = self.module.has_other_futures and bool(self.old)
        changed = changed or bool(outlines[0] - outlines[1]) or any(self.reads_dirty(n) for n in self.new)
        return changed or bool(self._calls[0] - self._calls[1]) or bool(self._makes_other)

    def is_called_for(self, cls: type) -> bool:
        """True when a call that may have made `cls`, as `type("Name", ...)` does, is no longer the same."""
        names = {name for name, _ in self._calls[0] - self._calls[1]}
        names |= {_class_name(call) for call in self._makes_other}
        return cls.__name__ in names or (None in names and cls.__module__ == self.module.name)

    def _is_dirty_call(self, call: ast.Call, function: FunctionNode) -> bool:
        own = local_names(function)
        reads = reads_of(ast.Expr(call)).now
        return any(root(r) not in own and self._inputs.is_dirty(self.module, r) for r in reads)

    def is_same(self, old: Nested, new: Nested) -> bool:
        """True when what runs where a definition stands is as before, and gives the same."""
        is_same = outline(old.node) == outline(new.node) and not self.module.has_other_futures
        return is_same and not self.reads_dirty(new)

    def reads_dirty(self, nested: Nested) -> bool:
        """True when what runs where it is defined reads something else than before."""
        reads = read_at_definition(nested.node)
        outer = nested.outer_names
        return any(root(r) not in outer and self._inputs.is_dirty(self.module, r) for r in reads)

    def is_dirty(self, node: ast.expr | None, nested: Nested) -> bool:
        """True when an expression reads something else than before."""
        reads = reads_of(ast.Expr(node)).now if node is not None else set()
        return any(root(r) not in nested.outer_names and self._inputs.is_dirty(self.module, r) for r in reads)

    def named(self, qualname: str) -> tuple[list[Nested], list[Nested]]:
        """The definitions of one qualified name, before and after."""
        return self._by_name.get(qualname, ([], []))


_CLASS_CALLS = frozenset({"make_dataclass", "namedtuple", "NamedTuple", "TypedDict", "new_class"})
_CLASS_CALLS |= {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}


def _functions_in(statement: ast.stmt) -> list[FunctionNode]:
    return [node for node in ast.walk(statement) if isinstance(node, _FUNCTIONS)]


def _calls(function: FunctionNode) -> list[ast.Call]:
    body = [function.body] if isinstance(function, ast.Lambda) else function.body
    return [node for node in own_nodes(body) if isinstance(node, ast.Call)]


def _class_name(call: ast.Call) -> str | None:
    first = call.args[0] if call.args else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def _names_class(call: ast.Call) -> bool:
    """True for a call that makes a class, or may do so as a metaclass does."""
    name = (dotted(call.func) or "").rpartition(".")[2]
    is_known = name in _CLASS_CALLS or (name == "type" and len(call.args) == 3)
    return is_known or (_class_name(call) is not None and len(call.args) > 1)


def _class_calls(function: FunctionNode) -> list[tuple[str | None, str]]:
    """The calls in a function that may make a class: the name of that, and what they are given."""
    body = [] if isinstance(function, ast.Lambda) else function.body
    found = []
    for call in _calls(function):
        if _names_class(call):
            read = reads_of(ast.Expr(call)).now
            given = [s for s in body if not isinstance(s, (*_FUNCTIONS, ast.ClassDef))]
            given = [s for s in given if reads_of(s).binds & {root(r) for r in read}]
            found.append((_class_name(call), "\n".join(map(shape_of, (call, *given)))))
    return found


def at_code(versions: Iterable[Nested], code: CodeType) -> Nested | None:
    """The definition of a function, found by where its code stands; None when it cannot be told."""
    found = [n for n in versions if not isinstance(n.node, ast.ClassDef) and _first_line(n.node) == code.co_firstlineno]
    found = [n for n in found if getattr(n.node, "name", "<lambda>") == code.co_name]
    if len(found) > 1:
        places = set(code.co_positions())
        found = [n for n in found if isinstance(n.node, ast.Lambda) and _place(n.node.body) in places]
    return found[0] if len(found) == 1 else None


def _place(node: ast.expr) -> tuple[int | None, int | None, int | None, int | None]:
    return (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)


def _first_line(node: FunctionNode) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _bindings(function: FunctionNode, name: str) -> int:
    """How often a call may bind a name, as far as it matters: 0, 1, or more."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    count = sum(a is not None and a.arg == name for a in every)
    if isinstance(function, ast.Lambda):
        return count
    nodes = own_nodes(function.body)
    count += sum(_stores(node, name) for node in nodes)
    for node in nodes:
        if isinstance(node, _LOOPS) and any(_stores(inner, name) for inner in own_nodes([node])):
            count += 1
    rebound = any(isinstance(node, ast.Nonlocal) and name in node.names for node in ast.walk(function))
    return count + rebound


def _stores(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Name(id=found, ctx=ast.Store() | ast.Del()):
            return found == name
        case ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found) | ast.ClassDef(name=found):
            return found == name
        case ast.Import() | ast.ImportFrom():
            return name in {alias.asname or root(alias.name) for alias in node.names}
        case ast.ExceptHandler(name=found) | ast.MatchAs(name=found) | ast.MatchStar(name=found):
            return found == name
    return False
