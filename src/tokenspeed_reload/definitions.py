"""A module's source as a list of statements, and the difference between two versions of it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tokenspeed_reload.names import Reads, dotted, reads_of, shape_of
from tokenspeed_reload.records import SourceText, lines_of
from tokenspeed_reload.scopes import own_nodes

StatementKind = Literal["import", "function", "class", "value", "future", "other"]
DEFINING: frozenset[StatementKind] = frozenset({"function", "class"})
"""The kinds of statements that define something under its own name."""

_EMPTY_CALLS = frozenset(
    {"dict", "list", "set", "defaultdict", "OrderedDict", "deque", "Counter"}
    | {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet"}
)
_DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp)


@dataclass(frozen=True)
class Use:
    """A name that a definition mentions.

    Attributes:
        owner: the function, class or module-level value in which it stands; "" where that may run at any time.
        in_function: the owner is a function.
        is_call: it is called right there.
    """

    module: str
    owner: str
    in_function: bool
    is_call: bool


class Statement:
    """One module-level statement.

    Attributes:
        node: its syntax tree.
        kind: what it is.
        segment: its source text, from the first decorator to its end.
        uses: the uses in it by name, None until they are asked for.
    """

    def __init__(self, node: ast.stmt, segment: str) -> None:
        self.node = node
        self.kind: StatementKind = _kind(node)
        self.segment = segment
        self.uses: dict[str, set[Use]] | None = None

    @cached_property
    def reads(self) -> Reads:
        """What it reads and binds."""
        return reads_of(self.node)

    @cached_property
    def shape(self) -> str:
        """The syntax without positions: equal for statements that mean the same."""
        return shape_of(self.node)

    @cached_property
    def first_line(self) -> int:
        """The line on which it starts, decorators included."""
        return first_line(self.node)

    @property
    def value(self) -> ast.expr | None:
        """The expression that a plain assignment assigns, or None."""
        return self.node.value if isinstance(self.node, ast.Assign | ast.AnnAssign) else None

    @property
    def has_definitions(self) -> bool:
        """True when it defines a function or class, at any depth."""
        return any(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for n in ast.walk(self.node))

    @cached_property
    def plain(self) -> str | None:
        """The syntax of a value's statement without its annotation; None for other statements."""
        match self.node:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                return f"{name} = {shape_of(self.value) if self.value is not None else ''}"
        return None

    @property
    def is_text(self) -> bool:
        """True for a bare constant, such as a docstring."""
        return isinstance(self.node, ast.Expr) and isinstance(self.node.value, ast.Constant)

    @property
    def is_empty_container(self) -> bool:
        """True for `NAME = {}` and its like: what the module fills later."""
        return self.value is not None and _is_empty(self.value)

    @property
    def is_container(self) -> bool:
        """True when the value is a container that this statement creates."""
        value = self.value
        if isinstance(value, ast.Call):
            name = dotted(value.func)
            return name is not None and name.rpartition(".")[2] in _EMPTY_CALLS | {"sorted"}
        return isinstance(value, _DISPLAYS)

    def __repr__(self) -> str:
        return f"Statement({self.kind}, {sorted(self.reads.binds)}, line {self.node.lineno})"


@dataclass
class Definitions:
    """All statements of one version of a module."""

    source: SourceText
    statements: list[Statement]

    @cached_property
    def binds(self) -> set[str]:
        """All names that the module's top level binds, stars excepted."""
        return {name for statement in self.statements for name in statement.reads.binds}

    @cached_property
    def keep(self) -> set[str]:
        """The names listed in `__reload_keep__`."""
        return self._listed("__reload_keep__")

    @cached_property
    def reset(self) -> set[str]:
        """The names listed in `__reload_reset__`."""
        return self._listed("__reload_reset__")

    @cached_property
    def futures(self) -> set[str]:
        """The features that its future statements turn on."""
        return {
            a.name
            for s in self.statements
            if isinstance(s.node, ast.ImportFrom) and s.kind == "future"
            for a in s.node.names
        }

    @cached_property
    def annotated(self) -> set[str]:
        """The names that the module's top level annotates."""
        nodes = own_nodes([s.node for s in self.statements])
        return {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}

    @cached_property
    def starred(self) -> set[str] | None:
        """The names that a star import of the module takes; None where `__all__` is not a plain list of them."""
        made = [s for s in self.statements if "__all__" in s.reads.binds | s.reads.mutates]
        if not made:
            return {name for name in self.binds if not name.startswith("_")}
        value = made[0].value
        if len(made) > 1 or not isinstance(value, ast.List | ast.Tuple):
            return None
        is_plain = all(isinstance(item, ast.Constant) for item in value.elts)
        return self._listed("__all__") if is_plain else None

    @property
    def has_docstring(self) -> bool:
        """True when the module starts with a text."""
        return bool(self.statements) and self.statements[0].is_text

    def kinds_of(self, name: str) -> set[StatementKind]:
        """The kinds of the statements that bind `name`."""
        return {s.kind for s in self.statements if name in s.reads.binds}

    def imports(self, name: str) -> bool:
        """True when an import binds `name`, in a block as well."""
        return any(name in s.reads.imports for s in self.statements)

    def _listed(self, variable: str) -> set[str]:
        names: set[str] = set()
        for statement in self.statements:
            if statement.value is not None and variable in statement.reads.binds:
                names |= {
                    n.value
                    for n in ast.walk(statement.value)
                    if isinstance(n, ast.Constant) and isinstance(n.value, str)
                }
        return names


def parse(source: SourceText, previous: Definitions | None = None) -> Definitions:
    """Split a module into statements; raises SyntaxError.

    What is known of equal statements of a `previous` version is taken over.
    """
    tree = ast.parse(source.data, source.path)
    lines = lines_of(source.text)
    statements = [Statement(node, _segment(lines, node)) for node in tree.body]
    known = {s.segment: s for s in previous.statements} if previous is not None else {}
    for statement in statements:
        equal = known.get(statement.segment)
        if equal is not None:
            statement.reads, statement.uses = equal.reads, equal.uses
    return Definitions(source, statements)


@dataclass
class Difference:
    """How the statements of a new version match those of the old one.

    Attributes:
        added: statements of the new version that the old one does not have in this form.
        removed: statements of the old version that the new one no longer has in this form.
    """

    added: list[Statement]
    removed: list[Statement]


def difference(old: Definitions, new: Definitions) -> Difference:
    """Match statements by their syntax, wherever they moved to."""
    texts = Counter(s.segment for s in old.statements) & Counter(s.segment for s in new.statements)
    old_rest = _without(old.statements, Counter(texts), lambda s: s.segment)
    new_rest = _without(new.statements, Counter(texts), lambda s: s.segment)
    shapes = Counter(s.shape for s in old_rest) & Counter(s.shape for s in new_rest)
    removed = _without(old_rest, Counter(shapes), lambda s: s.shape)
    added = _without(new_rest, Counter(shapes), lambda s: s.shape)
    return Difference(added, removed)


def _without(statements: list[Statement], counts: Counter[str], key: Callable[[Statement], str]) -> list[Statement]:
    rest: list[Statement] = []
    for statement in statements:
        if counts[key(statement)] > 0:
            counts[key(statement)] -= 1
        else:
            rest.append(statement)
    return rest


def first_line(node: ast.stmt) -> int:
    """The line on which a statement starts, decorators included."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _segment(lines: list[str], node: ast.stmt) -> str:
    first = first_line(node)
    last = node.end_lineno or node.lineno
    text = "".join(lines[first - 1 : last])
    # Statements that share a line are told apart by their columns.
    return f"{node.col_offset}:{node.end_col_offset}:{text.rstrip()}"


def _kind(node: ast.stmt) -> StatementKind:
    match node:
        case ast.ImportFrom(module="__future__"):
            return "future"
        case ast.Import() | ast.ImportFrom():
            return "import"
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return "function"
        case ast.ClassDef():
            return "class"
        case ast.Assign(targets=targets) if all(isinstance(t, ast.Name) for t in targets):
            return "value"
        case ast.AnnAssign(target=ast.Name()):
            return "value"
    return "other"


def _is_empty(value: ast.expr) -> bool:
    match value:
        case ast.Dict(keys=[]) | ast.List(elts=[]):
            return True
        case ast.Call(func=func, args=args, keywords=[]):
            name = dotted(func)
            short = name.rpartition(".")[2] if name else ""
            return short in _EMPTY_CALLS and (not args or (short == "defaultdict" and len(args) == 1))
    return False
