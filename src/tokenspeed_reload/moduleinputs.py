"""One module of a reload, before and after."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenspeed_reload.definitions import Definitions, Difference, Statement, difference
from tokenspeed_reload.dependencies import ImportEdge, import_edges, package_of, resolve
from tokenspeed_reload.values import attributes_of


@dataclass
class ModuleInputs:
    """What is known of one module, and what of it has to run.

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
        again: new statements that bind what another statement, which is gone or moved, bound after them, or that tried
            to import what is there now.
        late: names that the module itself puts into its namespace when it is asked for them.
        aliases: statements that only give a name to a module, by identity of the statement.
        annotated: statements of which the annotation alone is evaluated, by identity of the statement.
        unannotated: names that the new version no longer annotates.
        is_doubtful: it takes part only if it turns out to read something that changed, by a name in a text.
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
    again: set[int] = field(default_factory=set)
    late: set[str] = field(default_factory=set)
    aliases: set[int] = field(default_factory=set)
    annotated: set[int] = field(default_factory=set)
    unannotated: set[str] = field(default_factory=set)
    is_doubtful: bool = False

    @property
    def package(self) -> str:
        """The package against which its imports are relative."""
        return package_of(self.name, self.new.source)

    def statements(self) -> list[Statement]:
        """The statements to execute, in source order."""
        return [s for s in self.new.statements if id(s) in self.run]

    def found_as(self, name: str) -> str:
        """The name that decides what `module.name` gives: `__getattr__` where the module does not bind it."""
        is_bound = name in self.new.binds or (name in self.namespace and name not in self.late)
        return name if is_bound else "__getattr__"

    def prepare(self) -> None:
        """Compare the two versions and mark what changed by itself."""
        changes = difference(self.old, self.new)
        self._compare_annotations(changes)
        if self.has_other_futures:
            changes.added += [s for s in self.new.statements if s.has_definitions and s not in changes.added]
            changes.removed += [s for s in self.old.statements if s.has_definitions and s not in changes.removed]
        self.added = {id(s) for s in changes.added}
        self.dropped = changes.removed
        nodes = [s.node for s in self.new.statements]
        for edge in import_edges(self.name, self.new.source, nodes):
            if edge.at_import and edge.name != "*" and (edge.binds not in self.edges or self._is_taken(edge)):
                self.edges[edge.binds] = edge
        self.stars = [resolve(lv, m, self.package) for s in self.new.statements for lv, m in s.reads.stars]
        self.value_names = {
            name for s in self.new.statements if s.kind in ("value", "other") for name in s.reads.binds
        } - {n for s in self.new.statements if s.kind in ("function", "class") for n in s.reads.binds}
        self.removed = self.old.binds - self.new.binds
        for statement in (*changes.added, *changes.removed):
            self.dirty |= statement.reads.binds
            self.dirty |= statement.reads.mutates & self.value_names
        self.dirty |= {name for s in self.new.statements if id(s) in self.again for name in s.reads.binds}
        self._unmask()
        if not self.is_doubtful:
            self.reset()
        self.rebuilt = self.dirty & self.value_names
        set_before = {pair for s in changes.removed for pair in s.reads.attributes}
        self.lost = set_before - {pair for s in self.new.statements for pair in s.reads.attributes}
        if any(s.reads.is_dynamic for s in (*changes.added, *changes.removed)):
            self.dirty |= self.unseen

    def _is_taken(self, edge: ImportEdge) -> bool:
        """True when it is this one of several imports of a name that gave its value."""
        provider = sys.modules.get(edge.module if edge.name is not None else edge.gives)
        value = provider if edge.name is None else (attributes_of(provider) or {}).get(edge.name)
        return value is not None and self.namespace.get(edge.binds) is value

    def _unmask(self) -> None:
        """Let statements run that bind what another one bound after them, which no longer does."""
        last_old = {name: s for s in self.old.statements for name in s.reads.binds}
        last_new = {name: s for s in self.new.statements for name in s.reads.binds}
        names = {
            name
            for name, statement in last_new.items()
            if name in last_old
            and statement.shape != last_old[name].shape
            and id(statement) not in self.added | self.annotated
        }
        self.dirty |= names
        self.again |= {id(s) for s in self.new.statements if s.reads.binds & names}
        if not self.removed:
            return
        for statement in self.new.statements:
            if statement.reads.stars or statement.reads.is_dynamic:
                self.again.add(id(statement))
                self.dirty |= self.unseen if statement.reads.is_dynamic else set()

    @property
    def has_other_futures(self) -> bool:
        """True when the future statements changed, and with them what every definition means."""
        return self.old.futures != self.new.futures

    @property
    def star_changes(self) -> set[str]:
        """The names that a star import takes before the reload or after it, but not both."""
        if "__all__" not in self.dirty:
            return set()
        before, after = self.old.starred, self.new.starred
        return before ^ after if before is not None and after is not None else self.old.binds | self.new.binds

    def _compare_annotations(self, changes: Difference) -> None:
        """Take out of the changes the values of which only the annotation changed: they stay as they are."""
        self.unannotated = self.old.annotated - self.new.annotated
        before = {s.plain: s for s in changes.removed if s.plain is not None}
        for statement in list(changes.added):
            known = before.pop(statement.plain, None) if statement.plain is not None else None
            if known is not None:
                changes.added.remove(statement)
                changes.removed.remove(known)
                self.annotated.add(id(statement))
        if self.has_other_futures:
            self.annotated |= {id(s) for s in self.new.statements if isinstance(s.node, ast.AnnAssign)}
        if self.annotated or self.unannotated:
            self.dirty.add("__annotations__")

    def reset(self) -> None:
        """Mark what is built anew whenever the module takes part."""
        for statement in self.new.statements:
            if statement.is_empty_container or statement.reads.binds & self.new.reset:
                names = statement.reads.binds - self.new.keep
                self.dirty |= names
                self.rebuilt |= names & self.value_names


def tried_imports(name: str, definitions: Definitions, modules: Collection[str]) -> dict[int, str]:
    """The statements of a module, by identity, that try to import one of these modules, each with that."""
    found: dict[int, str] = {}
    for statement in definitions.statements if modules else ():
        if isinstance(statement.node, ast.Try):
            for edge in import_edges(name, definitions.source, [statement.node]):
                named = {edge.module, f"{edge.module}.{edge.name}"} & set(modules)
                if edge.at_import and named:
                    found[id(statement)] = min(named)
    return found
