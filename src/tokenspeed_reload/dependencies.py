"""Who uses whom: imports in the syntax, and objects found in module namespaces."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from tokenspeed_reload.lookups import may_find_any, quoted_in
from tokenspeed_reload.records import ModuleRecord, SourceText
from tokenspeed_reload.values import attributes_of, is_a, module_name


@dataclass(frozen=True)
class ImportEdge:
    """One imported name.

    Attributes:
        module: the module that is imported, absolute.
        name: the attribute or submodule taken from it; None for `import x`; "*" for a star import.
        binds: the local name.
        at_import: False when the statement stands in a function body.
        gives: the module that the local name stands for, where it stands for one: `import a.b` binds a.
    """

    module: str
    name: str | None
    binds: str
    at_import: bool
    gives: str = ""


def resolve(level: int, module: str, package: str) -> str:
    """The absolute name of a possibly relative import in a module of `package`."""
    if level == 0:
        return module
    parent = package.split(".")
    parent = parent[: len(parent) - level + 1]
    return ".".join([*parent, module] if module else parent)


def package_of(name: str, source: SourceText) -> str:
    """The package against which the imports of a module are relative."""
    return name if source.is_package else name.rpartition(".")[0]


_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def import_edges(name: str, source: SourceText, tree: Iterable[ast.stmt]) -> list[ImportEdge]:
    """All imports of a module, in whatever block they stand."""
    package = package_of(name, source)
    edges: list[ImportEdge] = []
    todo: list[tuple[ast.AST, bool]] = [(node, True) for node in tree]
    while todo:
        node, at_import = todo.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                gives = alias.name if alias.asname else first
                edges.append(ImportEdge(alias.name, None, alias.asname or first, at_import, gives))
        elif isinstance(node, ast.ImportFrom):
            module = resolve(node.level, node.module or "", package)
            for alias in node.names:
                edges.append(ImportEdge(module, alias.name, alias.asname or alias.name, at_import))
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            inner = at_import and not is_function
            todo.extend((child, inner) for block in _BLOCKS for child in getattr(node, block, ()))
    return edges


def providers_of(edges: Iterable[ImportEdge], loaded: Mapping[str, Any], at_import: bool = False) -> set[str]:
    """The loaded modules that these imports name, without the packages on the way."""
    found: set[str] = set()
    for edge in edges:
        if at_import and not edge.at_import:
            continue
        submodule = f"{edge.module}.{edge.name}"
        if submodule in loaded:
            found.add(submodule)  # a submodule, which does not use what the package itself defines
        elif edge.module in loaded:
            found.add(edge.module)
    return found


def home_of(value: Any) -> str | None:
    """The name of the module that defines `value`, if it tells."""
    if is_a(value, ModuleType):
        return module_name(value)
    if is_a(value, FunctionType):
        name = value.__globals__.get("__name__")
        return name if is_a(name, str) else None
    cls = value if is_a(value, type) else type(value)
    module = cls.__dict__.get("__module__")
    if module in (None, "functools", "builtins"):
        inner = getattr(value, "__wrapped__", None) if type(value).__module__ == "functools" else None
        return home_of(inner) if is_a(inner, FunctionType) else None
    return module if is_a(module, str) else None


def used_by_objects(name: str, namespace: Mapping[str, Any]) -> set[str]:
    """The modules whose objects the namespace of module `name` holds, directly or in a container."""
    found: set[str] = set()
    for value in [value for key, value in list(namespace.items()) if key != "__builtins__"]:
        inner: Iterable[Any] = ()
        if type(value) is dict:
            inner = list(value.values())
        elif type(value) in (list, tuple, set, frozenset):
            inner = list(value)
        for item in (value, *inner):
            if is_a(item, ModuleType) and _is_on_the_way(item, name):
                continue
            home = home_of(item)
            if home is not None:
                found.add(home)
    return found


def _is_on_the_way(item: ModuleType, name: str) -> bool:
    """True for the a that `import a.b` binds, and for the submodules that a package holds by being one."""
    return "__path__" in vars(item) or module_name(item).startswith(name + ".")


@dataclass(frozen=True)
class Mentions:
    """What the source of a module tells of its use of others.

    Attributes:
        sha256: the hash of the source.
        edges: its imports.
        quoted: texts in it that may name a module, or something in one.
        words: all names in it.
        finds_any: it may look up modules by names that it does not show.
    """

    sha256: str
    edges: list[ImportEdge]
    quoted: frozenset[str]
    words: frozenset[str]
    finds_any: bool


class Uses:
    """Which of the recorded modules use which; what the sources tell is remembered."""

    def __init__(self) -> None:
        self._known: dict[str, Mentions] = {}

    def users(
        self, changed: Iterable[str], candidates: Mapping[str, ModuleRecord]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """The modules of `candidates` that use a changed one, directly or not, each with the one it uses.

        The second of the two has those that may do so by names in texts.
        """
        sure = {name: self._uses(name, record) for name, record in candidates.items()}
        reasons = _closure(changed, sure)
        known = [*changed, *reasons]
        both = {name: sure[name] | self.may_use(name, record, candidates) for name, record in candidates.items()}
        return reasons, _closure(known, both)

    def may_use(self, name: str, record: ModuleRecord, recorded: Iterable[str]) -> set[str]:
        """The modules of which a module may read something without an import of them."""
        mentions = self._mentions(name, record)
        if mentions.finds_any:
            return set(recorded) - {name}
        package = package_of(name, record.source)
        packages = {edge.gives or f"{edge.module}.{edge.name}" for edge in mentions.edges}
        packages = {f"{p}." for p in packages if "__path__" in (attributes_of(sys.modules.get(p)) or {})}
        found = {
            module
            for module in recorded
            for prefix in packages
            if module.startswith(prefix) and mentions.words.issuperset(module.removeprefix(prefix).split("."))
        }
        for text in mentions.quoted:
            path = text.partition(":")[0]
            bare = path.lstrip(".")
            full = resolve(len(path) - len(bare), bare, package)
            while full:
                found.add(full)
                full = full.rpartition(".")[0]
        return found - {name}

    def study(self, name: str, record: ModuleRecord) -> None:
        """Read and remember what the source of a module tells."""
        self._mentions(name, record)

    def named(self, name: str, record: ModuleRecord, modules: Collection[str]) -> set[str]:
        """Those of `modules` that the source of a module names, in an import or a text."""
        texts = set() if self.finds_any(name, record) else self.may_use(name, record, modules)
        return (providers_of(self._mentions(name, record).edges, sys.modules) | texts).intersection(modules) - {name}

    def forget(self, name: str) -> None:
        """Drop what is remembered of a module."""
        self._known.pop(name, None)

    def finds_any(self, name: str, record: ModuleRecord) -> bool:
        """Whether a module may look up modules by names that it does not show."""
        return self._mentions(name, record).finds_any

    def _uses(self, name: str, record: ModuleRecord) -> set[str]:
        module = sys.modules.get(name)
        objects = used_by_objects(name, vars(module)) if is_a(module, ModuleType) else set()
        return (objects | providers_of(self._mentions(name, record).edges, sys.modules)) - {name}

    def _mentions(self, name: str, record: ModuleRecord) -> Mentions:
        known = self._known.get(name)
        if known is None or known.sha256 != record.source.sha256:
            text = record.source.text
            tree = ast.parse(record.source.data, record.source.path).body
            known = self._known[name] = Mentions(
                record.source.sha256,
                import_edges(name, record.source, tree),
                frozenset(quoted_in(text)),
                frozenset(re.findall(r"\w+", text)),
                may_find_any(text),
            )
        return known


def _closure(changed: Iterable[str], uses: Mapping[str, set[str]]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    known = set(changed)
    todo = list(changed)
    while todo:
        provider = todo.pop(0)
        for name, providers in uses.items():
            if name not in known and provider in providers:
                known.add(name)
                reasons[name] = provider
                todo.append(name)
    return reasons


def ordered(names: Iterable[str], providers: Mapping[str, set[str]]) -> list[str]:
    """Providers before users; modules of one cycle keep the order in which they were first imported."""
    position = {name: index for index, name in enumerate(list(sys.modules))}
    pending = sorted(names, key=lambda name: position.get(name, len(position)))
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    result: list[str] = []

    def connect(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for provider in sorted(providers.get(name, ()), key=lambda n: position.get(n, len(position))):
            if provider not in members:
                continue
            if provider not in index:
                connect(provider)
                low[name] = min(low[name], low[provider])
            elif provider in stack:
                low[name] = min(low[name], index[provider])
        if low[name] == index[name]:
            at = stack.index(name)
            cycle = sorted(stack[at:], key=lambda n: position.get(n, len(position)))
            del stack[at:]
            result.extend(cycle)

    members = set(pending)
    for name in pending:
        if name not in index:
            connect(name)
    return result
