"""Which statements of a set of modules have to run again, because they or their inputs changed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from tokenspeed_reload.definitions import DEFINING, Statement
from tokenspeed_reload.dependencies import ImportEdge, home_of, package_of, resolve
from tokenspeed_reload.lookups import OWN_NAMES, module_in, root, spell
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.names import Reads
from tokenspeed_reload.values import is_a, module_name


class Inputs:
    """The analysis over all modules of a reload, as one fixed point; nothing is executed."""

    def __init__(self, modules: dict[str, ModuleInputs], recorded: Container[str] = ()) -> None:
        self.modules = modules
        self.recorded = recorded

    def analyse(self) -> None:
        """Fill `dirty`, `run`, `rebuilt` and `removed` of every module, and drop those that need not take part."""
        for module in self.modules.values():
            module.prepare()
            self._note_aliases(module)
        self._spread_all(self.modules.values())
        while joined := [m for m in self.modules.values() if m.is_doubtful and self._takes_part(m)]:
            for module in joined:
                module.is_doubtful = False
                module.reset()
            self._spread_all(self.modules.values())
        self.modules = {name: module for name, module in self.modules.items() if not module.is_doubtful}
        for module in self.modules.values():
            self._choose(module)
            self._drop_stars(module)
            self._clear(module)

    def observe(self, modules: Collection[ModuleInputs]) -> None:
        """Mark what follows in `modules`, which are not executed, from what is dirty in the others."""
        for module in modules:
            module.prepare()
            self._note_aliases(module)
        self._spread_all(modules)

    def sources_of(self, module: ModuleInputs, name: str) -> list[str]:
        """What the statements that bind `name` read that is dirty, as the source spells it."""
        statements = [s for s in module.new.statements if name in s.reads.binds]
        reads = {read for s in statements for read in s.reads.now if module_in(read) is None and read != OWN_NAMES}
        return sorted(read for read in reads if self.is_dirty(module, read))

    def _spread_all(self, modules: Collection[ModuleInputs]) -> None:
        grown = True
        while grown:
            grown = False
            for module in modules:
                grown = self._spread(module) or grown

    def _takes_part(self, module: ModuleInputs) -> bool:
        if module.dirty:
            return True
        self._choose(module)
        return bool(module.run)

    def is_any_dirty(self, module: ModuleInputs, reads: Reads, without: Container[str] = ()) -> bool:
        """True when anything that is read while the statement runs behaves differently after the reload."""
        return (
            any(self.is_dirty(module, read) for read in reads.now if read not in without)
            or any(self._path_is_dirty(module, path, reads) for path in reads.paths_now)
            or self._import_is_dirty(module, reads)
        )

    def _is_any_dirty_later(self, module: ModuleInputs, reads: Reads) -> bool:
        return any(self.is_dirty(module, read) for read in reads.later) or any(
            self._path_is_dirty(module, path, reads) for path in reads.paths_later
        )

    def is_dirty(self, module: ModuleInputs, read: str) -> bool:
        """True when what `read` names in `module` behaves differently after the reload."""
        first, *rest = read.split(".")
        if first in module.dirty:
            return True
        if first == OWN_NAMES:
            return bool(module.dirty) or any(self._reaches(m, []) for m in _modules_held(module))
        if module_in(read) is not None:
            name = _named(module, read)
            if name is None:
                return any(other.dirty for other in self.modules.values() if other is not module)
            return self._reaches(name, rest)
        edge = module.edges.get(first)
        value: Any = module.namespace.get(first)
        if edge is not None:
            return self._edge_is_dirty(edge, rest)
        if is_a(value, ModuleType):
            return self._reaches(module_name(value), rest)
        if self._from_star(module, first):
            return True
        return self._object_is_dirty(value)

    def _path_is_dirty(self, module: ModuleInputs, path: str, reads: Reads) -> bool:
        """True for a text that names something that changed: a module of which that is read, or the thing itself."""
        written, _, attribute = path.partition(":")
        name = written.lstrip(".")
        level = len(written) - len(name)
        parts = [part for part in resolve(level, name, module.package).split(".") if part]
        rest = attribute.split(".") if attribute else []
        for length in range(len(parts), 0, -1):
            target = self.modules.get(".".join(parts[:length]))
            if target is None:
                continue
            below = [*parts[length:], *rest]
            if below:
                return self._reaches(target.name, below)
            return bool({target.found_as(n) for n in reads.named} & target.dirty)
        if level or "." not in name:
            return False
        held: list[Any] = [module.namespace.get(read) for read in (*reads.now, *reads.later)]
        return any(is_a(value, ModuleType) and self._reaches(module_name(value), name.split(".")) for value in held)

    def _edge_is_dirty(self, edge: ImportEdge, rest: list[str]) -> bool:
        if edge.name is None:
            return self._reaches(edge.gives, rest)
        return self._reaches(edge.module, [edge.name, *rest])

    def _note_aliases(self, module: ModuleInputs) -> None:
        """Take `m = import_module("k")` and its like for imports."""
        for statement in module.new.statements:
            names = statement.reads.binds
            if statement.kind != "value" or len(names) != 1 or statement.value is None:
                continue
            read = spell(statement.value)
            found = self._module_at(module, read) if read is not None else None
            if found is not None:
                (name,) = names
                module.aliases.add(id(statement))
                module.edges[name] = ImportEdge(found, None, name, True, found)

    def _module_at(self, module: ModuleInputs, read: str) -> str | None:
        """The loaded module that a read stands for as a whole, or None."""
        first, *rest = read.split(".")
        if first == OWN_NAMES:
            return None
        if module_in(read) is not None:
            name = _named(module, read)
        else:
            edge = module.edges.get(first)
            value: Any = module.namespace.get(first)
            name = edge.gives if edge is not None and edge.name is None else None
            if name is None and is_a(value, ModuleType):
                name = module_name(value)
        name = ".".join([name, *rest]) if name is not None else None
        return name if name is not None and is_a(sys.modules.get(name), ModuleType) else None

    def _reaches(self, module: str, path: Iterable[str]) -> bool:
        rest = list(path)
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
        return any(
            self._reaches(resolve(level, name, module.package), [attribute] if attribute is not None else [])
            for level, name, attribute in statement.reads.inner_imports
        )

    def _import_is_dirty(self, module: ModuleInputs, reads: Reads) -> bool:
        """True when what is imported behaves differently, in whatever block the import stands."""
        if any(self._from_star_module(module, level, name) for level, name in reads.stars):
            return True
        return any(self._taken_is_dirty(module, *taken) for taken in reads.taken)

    def _taken_is_dirty(self, module: ModuleInputs, level: int, provider: str, name: str) -> bool:
        provider = resolve(level, provider, module.package)
        if f"{provider}.{name}" in self.modules and not self._defines(provider, name):
            return False  # a module object stays the same; what is read from it is followed by attribute
        return self._reaches(provider, [name])

    def _from_star_module(self, module: ModuleInputs, level: int, name: str) -> bool:
        provider = self.modules.get(resolve(level, name, module.package))
        return provider is not None and bool(provider.dirty)

    def _spread(self, module: ModuleInputs) -> bool:
        before = len(module.dirty)
        for statement in module.new.statements:
            reads = statement.reads
            targets = reads.binds | (reads.mutates & module.value_names)
            targets |= module.unseen if reads.is_dynamic else set()
            if reads.stars and self._import_is_dirty(module, reads):
                module.dirty |= self._star_names(module, statement)
            if targets <= module.dirty or id(statement) in module.aliases:
                continue
            if statement.kind == "import":
                module.dirty |= {n for n in reads.binds if self._import_binding_dirty(module, n)}
            elif (
                id(statement) in module.added
                or self.is_any_dirty(module, reads)
                or self._is_any_dirty_later(module, reads)
                or self._inner_imports_dirty(module, statement)
            ):
                module.dirty |= targets - module.new.keep
        return len(module.dirty) != before

    def _import_binding_dirty(self, module: ModuleInputs, name: str) -> bool:
        edge = module.edges.get(name)
        if edge is None or edge.name is None:
            return False
        return self._taken_is_dirty(module, 0, edge.module, edge.name)

    def _star_names(self, module: ModuleInputs, statement: Statement) -> set[str]:
        names: set[str] = set()
        for level, name in statement.reads.stars:
            provider = self.modules.get(resolve(level, name, module.package))
            if provider is not None:
                names |= {n for n in provider.dirty if not n.startswith("_") or n in module.namespace}
                names |= provider.star_changes
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
                followed = self._followed(module, statement) if reads.handed_on else set()
                due = due or (id(statement) not in module.aliases and self.is_any_dirty(module, reads, followed))
                due = due or bool(reads.binds & missing) or id(statement) in module.again
                if due:
                    missing |= {r for r in map(root, reads.now) if r not in module.namespace}
                    run.add(id(statement))
                    values = (reads.binds | reads.mutates) & module.value_names
                    module.rebuilt |= values - keep
                    if statement.kind == "other":  # it decides which of several definitions holds
                        module.remade |= reads.binds & several
                    grown = True
            grown = self._choose_later_binders(module, run, keep) or grown
        module.run = run

    def _choose_later_binders(self, module: ModuleInputs, run: set[int], keep: set[str]) -> bool:
        """What binds a name after a statement that is due is due too; True when that adds any."""
        bound: set[str] = set()
        before = len(run)
        for statement in module.new.statements:
            if id(statement) not in run and statement.kind != "other" and statement.reads.binds & bound - keep:
                run.add(id(statement))
                module.rebuilt |= statement.reads.binds & module.value_names - keep
            if id(statement) in run:
                bound |= statement.reads.binds
                for level, name in statement.reads.stars:
                    provider = sys.modules.get(resolve(level, name, module.package))
                    bound |= _public(vars(provider)) if is_a(provider, ModuleType) else set()
        return len(run) != before

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
            if is_a(module.namespace.get(name), FunctionType | type)
            and module.old.kinds_of(name) == module.new.kinds_of(name) <= DEFINING | {"import"}
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
        if any(s.reads.stars or s.reads.is_dynamic for s in due):
            module.cleared |= module.removed
            module.removed = set()
        if "__getattr__" in module.dirty:
            module.cleared |= module.late
        if module.unseen & module.dirty:
            module.cleared |= module.unseen
        for statement in due:
            for level, name in statement.reads.stars:
                provider = sys.modules.get(resolve(level, name, module.package))
                if is_a(provider, ModuleType):
                    module.cleared |= _brought(module, vars(provider))
        module.cleared -= module.new.keep | module.removed

    def _drop_stars(self, module: ModuleInputs) -> None:
        """A name that came through a star import goes when its provider drops it, or the import itself goes."""
        package = package_of(module.name, module.old.source)
        for level, name in [star for s in module.dropped for star in s.reads.stars]:
            star = resolve(level, name, package)
            if star in module.stars or not is_a(sys.modules.get(star), ModuleType):
                continue
            module.removed |= _brought(module, vars(sys.modules[star]))


def _named(module: ModuleInputs, read: str) -> str | None:
    """The module that the first part of a read names, None when that may be any."""
    level, name = module_in(read) or (0, "*")
    if name == "*":
        return None
    first, dot, rest = name.partition(".")
    own = {"__name__": module.name, "__package__": module.package}.get(first)
    return own + dot + rest if own is not None else resolve(level, name, module.package)


def _modules_held(module: ModuleInputs) -> set[str]:
    """The modules that stand under names of the module."""
    held = {module_name(value) for value in module.namespace.values() if is_a(value, ModuleType)}
    return held | {edge.gives for edge in module.edges.values() if edge.name is None}


def _public(there: Mapping[str, Any]) -> set[str]:
    """The names that a star import takes from a namespace."""
    public: Any = there.get("__all__")
    return set(public) if is_a(public, list | tuple) else {n for n in there if not n.startswith("_")}


def _brought(module: ModuleInputs, there: Mapping[str, Any]) -> set[str]:
    """The names that a star import from the namespace `there` brought into the module."""
    same = {n for n in _public(there) if n in module.namespace and module.namespace[n] is there.get(n)}
    return same - module.new.binds - module.old.binds
