"""Which statements of a set of modules have to run again, because they or their inputs changed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from tokenspeed_reload.definitions import Definitions, Statement, difference
from tokenspeed_reload.dependencies import ImportEdge, home_of, import_edges, package_of, resolve
from tokenspeed_reload.names import root
from tokenspeed_reload.values import is_a


@dataclass
class ModuleInputs:
    """One module of the set, before and after.

    Attributes:
        name: the module's name.
        old: what it last ran.
        new: what it shall run.
        namespace: the live module's namespace.
        dirty: names whose object behaves differently after the reload.
        run: the new statements to execute, by identity of the statement.
        rebuilt: value names that are built anew.
        removed: names that the new version no longer binds.
        dropped: statements of the old version that the new one no longer has in this form.
        unseen: names that statements of the old version bound without showing it in the syntax.
        lost: attributes of module-level names that no statement sets any more, as (name, attribute).
        remade: definitions that run again with all that is done to them.
        cleared: names that are taken away before the statements run, which bind those of them that stay.
    """

    name: str
    old: Definitions
    new: Definitions
    namespace: Mapping[str, Any]
    unseen: set[str] = field(default_factory=set)
    dirty: set[str] = field(default_factory=set)
    run: set[int] = field(default_factory=set)
    rebuilt: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    dropped: list[Statement] = field(default_factory=list)
    edges: dict[str, ImportEdge] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    added: set[int] = field(default_factory=set)
    value_names: set[str] = field(default_factory=set)
    cleared: set[str] = field(default_factory=set)
    lost: set[tuple[str, str]] = field(default_factory=set)
    remade: set[str] = field(default_factory=set)

    def statements(self) -> list[Statement]:
        """The statements to execute, in source order."""
        return [s for s in self.new.statements if id(s) in self.run]

    def found_as(self, name: str) -> str:
        """The name that decides what `module.name` gives: `__getattr__` where the module does not bind it."""
        return name if name in self.new.binds or name in self.namespace else "__getattr__"

    def prepare(self) -> None:
        """Compare the two versions and mark what changed by itself."""
        changes = difference(self.old, self.new)
        self.added = {id(s) for s in changes.added}
        self.dropped = changes.removed
        package = package_of(self.name, self.new.source)
        nodes = [s.node for s in self.new.statements]
        for edge in import_edges(self.name, self.new.source, nodes):
            if edge.at_import and edge.name != "*":
                self.edges[edge.binds] = edge
        self.stars = [resolve(lv, m, package) for s in self.new.statements for lv, m in s.reads.stars]
        self.value_names = {
            name for s in self.new.statements if s.kind in ("value", "other") for name in s.reads.binds
        } - {n for s in self.new.statements if s.kind in ("function", "class") for n in s.reads.binds}
        self.removed = self.old.binds - self.new.binds
        for statement in (*changes.added, *changes.removed):
            self.dirty |= statement.reads.binds
            self.dirty |= statement.reads.mutates & self.value_names
        for statement in self.new.statements:
            if statement.is_empty_container or statement.reads.binds & self.new.reset:
                self.dirty |= statement.reads.binds - self.new.keep
        self.rebuilt = self.dirty & self.value_names
        set_before = {pair for s in changes.removed for pair in s.reads.attributes}
        self.lost = set_before - {pair for s in self.new.statements for pair in s.reads.attributes}
        if any(s.reads.is_dynamic for s in (*changes.added, *changes.removed)):
            self.dirty |= self.unseen


class Inputs:
    """The analysis over all modules of a reload, as one fixed point; nothing is executed."""

    def __init__(self, modules: Mapping[str, ModuleInputs], recorded: Container[str] = ()) -> None:
        self.modules = modules
        self.recorded = recorded

    def analyse(self) -> None:
        """Fill `dirty`, `run`, `rebuilt` and `removed` of every module."""
        for module in self.modules.values():
            module.prepare()
        grown = True
        while grown:
            grown = False
            for module in self.modules.values():
                grown = self._spread(module) or grown
        for module in self.modules.values():
            self._choose(module)
            self._drop_stars(module)
            self._clear(module)

    def is_dirty(self, module: ModuleInputs, read: str) -> bool:
        """True when what `read` names in `module` behaves differently after the reload."""
        parts = read.split(".")
        if parts[0] in module.dirty:
            return True
        edge = module.edges.get(parts[0])
        value: Any = module.namespace.get(parts[0])
        if edge is not None:
            return self._reaches(edge.module, edge.name, parts[1:], edge.binds)
        if is_a(value, ModuleType):
            return self._reaches(value.__name__, None, parts[1:], "")
        if self._from_star(module, parts[0]):
            return True
        return self._object_is_dirty(value)

    def _reaches(self, module: str, name: str | None, rest: list[str], binds: str) -> bool:
        if name is None and binds and binds != module and module.startswith(binds + "."):
            module = binds  # `import a.b` binds a
        rest = [name, *rest] if name is not None else list(rest)
        while rest and f"{module}.{rest[0]}" in sys.modules and not self._defines(module, rest[0]):
            module = f"{module}.{rest.pop(0)}"
        target = self.modules.get(module)
        if target is not None:
            return bool(target.dirty & {rest[0], target.found_as(rest[0])}) if rest else bool(target.dirty)
        live = sys.modules.get(module)
        return bool(rest) and is_a(live, ModuleType) and self._object_is_dirty(vars(live).get(rest[0]))

    def _defines(self, module: str, name: str) -> bool:
        known = self.modules.get(module)
        return known is not None and name in known.new.binds and name not in known.edges

    def _from_star(self, module: ModuleInputs, name: str) -> bool:
        return any(s in self.modules and name in self.modules[s].dirty for s in module.stars)

    def _object_is_dirty(self, value: Any) -> bool:
        """By use: an object that came here by another way than an import."""
        if not is_a(value, FunctionType | type):
            return False
        home = self.modules.get(value.__module__ or "")
        return home is not None and root(value.__qualname__) in home.dirty

    def _inner_imports_dirty(self, module: ModuleInputs, statement: Statement) -> bool:
        package = package_of(module.name, module.new.source)
        return any(
            self._reaches(resolve(level, name, package), attribute, [], "")
            for level, name, attribute in statement.reads.inner_imports
        )

    def _import_dirty(self, module: ModuleInputs, statement: Statement) -> bool:
        if any(self._from_star_module(module, lv, m) for lv, m in statement.reads.stars):
            return True
        edges = (module.edges[n] for n in statement.reads.binds if n in module.edges)
        return any(self._reaches(edge.module, edge.name, [], edge.binds) for edge in edges if edge.name is not None)

    def _from_star_module(self, module: ModuleInputs, level: int, name: str) -> bool:
        provider = self.modules.get(resolve(level, name, package_of(module.name, module.new.source)))
        return provider is not None and bool(provider.dirty)

    def _spread(self, module: ModuleInputs) -> bool:
        before = len(module.dirty)
        for statement in module.new.statements:
            reads = statement.reads
            targets = reads.binds | (reads.mutates & module.value_names)
            if reads.stars and self._import_dirty(module, statement):
                module.dirty |= self._star_names(module, statement)
            if targets <= module.dirty:
                continue
            if statement.kind == "import":
                module.dirty |= {n for n in reads.binds if self._import_binding_dirty(module, n)}
            elif (
                id(statement) in module.added
                or any(self.is_dirty(module, read) for read in reads.now | reads.later)
                or self._inner_imports_dirty(module, statement)
            ):
                module.dirty |= targets - module.new.keep
        return len(module.dirty) != before

    def _import_binding_dirty(self, module: ModuleInputs, name: str) -> bool:
        edge = module.edges.get(name)
        if edge is None or edge.name is None:
            return False  # a module object stays the same; what is read from it is followed by attribute
        if f"{edge.module}.{edge.name}" in self.modules and not self._defines(edge.module, edge.name):
            return False
        return self._reaches(edge.module, edge.name, [], edge.binds)

    def _star_names(self, module: ModuleInputs, statement: Statement) -> set[str]:
        names: set[str] = set()
        for level, name in statement.reads.stars:
            provider = self.modules.get(resolve(level, name, package_of(module.name, module.new.source)))
            if provider is not None:
                names |= {n for n in provider.dirty if not n.startswith("_") or n in module.namespace}
        return names - module.new.binds

    def _choose(self, module: ModuleInputs) -> None:
        """Select the statements to run: all of a value that is rebuilt, and whatever reads something dirty."""
        keep = {name for name in module.new.keep if name in module.namespace}
        module.rebuilt -= keep
        definitions = module.new.binds - module.value_names
        for statement in (*module.dropped, *(s for s in module.new.statements if id(s) in module.added)):
            if statement.kind == "other":
                module.remade |= statement.reads.mutates & definitions
        binders = Counter(n for s in module.new.statements for n in s.reads.binds)
        several = {name for name, count in binders.items() if count > 1} - keep
        run: set[int] = set()
        missing: set[str] = set()  # what a due statement reads and what was deleted since it was bound
        grown = True
        while grown:
            grown = False
            for statement in module.new.statements:
                reads = statement.reads
                if id(statement) in run or (reads.binds and reads.binds <= keep):
                    continue
                due = id(statement) in module.added or bool((reads.binds | reads.mutates) & module.rebuilt)
                due = due or bool((reads.binds | reads.mutates) & module.remade)
                due = due or (reads.is_dynamic and bool(module.unseen & module.dirty))
                if statement.kind == "import":
                    due = due or self._import_dirty(module, statement)
                followed = self._followed(module, statement) if reads.handed_on else set()
                due = due or any(self.is_dirty(module, read) for read in reads.now - followed)
                due = due or bool(reads.binds & missing)
                if due:
                    missing |= {r for r in map(root, reads.now) if r not in module.namespace}
                    run.add(id(statement))
                    values = (reads.binds | reads.mutates) & module.value_names
                    module.rebuilt |= values - keep
                    if statement.kind == "other":  # it decides which of several definitions holds
                        module.remade |= reads.binds & several
                    grown = True
        module.run = run

    def _followed(self, module: ModuleInputs, statement: Statement) -> set[str]:
        """The functions and classes that a bare call hands to code outside, which follow in place.

        Running `atexit.register(f)` again because f was edited would register it twice.
        """
        names = {root(read) for read in statement.reads.now} - statement.reads.handed_on
        if any(self._is_recorded(module.namespace.get(name)) for name in names if name in module.namespace):
            return set()
        return {
            name
            for name in statement.reads.handed_on
            if isinstance(module.namespace.get(name), FunctionType | type)
            and module.old.kinds_of(name) == module.new.kinds_of(name) <= {"function", "class", "import"}
        }

    def _is_recorded(self, value: Any) -> bool:
        home = home_of(value)
        return home is not None and home in self.recorded

    def _clear(self, module: ModuleInputs) -> None:
        """Find the names that are bound anew only where their statements still do so.

        A branch may no longer be taken, a star import may no longer bring a name.
        """
        due = module.statements()
        late = {n for s in module.new.statements if id(s) not in module.run for n in s.reads.binds}
        module.cleared = {n for s in due if s.kind == "other" for n in s.reads.binds} - late
        if module.unseen & module.dirty:
            module.cleared |= module.unseen
        for statement in due:
            for level, name in statement.reads.stars:
                provider = sys.modules.get(resolve(level, name, package_of(module.name, module.new.source)))
                if isinstance(provider, ModuleType):
                    module.cleared |= _brought(module, vars(provider))
        module.cleared -= module.new.keep | module.removed

    def _drop_stars(self, module: ModuleInputs) -> None:
        """A name that came through a star import goes when its provider drops it, or the import itself goes."""
        package = package_of(module.name, module.old.source)
        for level, name in [star for s in module.dropped for star in s.reads.stars]:
            star = resolve(level, name, package)
            if star in module.stars or not isinstance(sys.modules.get(star), ModuleType):
                continue
            module.removed |= _brought(module, vars(sys.modules[star]))


def _brought(module: ModuleInputs, there: Mapping[str, Any]) -> set[str]:
    """The names that a star import from the namespace `there` brought into the module."""
    public = there.get("__all__")
    names = set(public) if isinstance(public, list | tuple) else {n for n in there if not n.startswith("_")}
    same = {n for n in names if n in module.namespace and module.namespace[n] is there.get(n)}
    return same - module.new.binds - module.old.binds
