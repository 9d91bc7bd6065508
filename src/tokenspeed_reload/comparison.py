"""What the two sources of a module tell of one definition: what of it the edit changed."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

from tokenspeed_reload.definitions import Definitions, first_line
from tokenspeed_reload.inputs import Inputs
from tokenspeed_reload.lookups import root
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.names import reads_of, shape_of
from tokenspeed_reload.records import ModuleRecord
from tokenspeed_reload.scopes import own_nodes
from tokenspeed_reload.values import is_a

DefinitionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Comparison:
    """Answers for the live objects of one reload.

    Args:
        inputs: the analysis of all modules of the reload.
        padding: code objects with unused nonlocal names, each with the plain code that it stands for.
        recorded: what is known of the modules, by name.

    Attributes:
        makers_ran: the functions around the definitions that ran again did so too, and may have given other values.
    """

    def __init__(
        self, inputs: Inputs, padding: Mapping[CodeType, CodeType], recorded: Mapping[str, ModuleRecord]
    ) -> None:
        self._inputs = inputs
        self._padding = padding
        self._recorded = recorded
        self._member_edits: dict[tuple[str, str, bool], set[str]] = {}
        self.makers_ran = True

    def module_of(self, value: Any) -> ModuleInputs | None:
        """The module of this reload in which a function or class was defined."""
        name = value.__globals__.get("__name__") if is_a(value, FunctionType) else value.__module__
        return self._inputs.modules.get(name or "")

    def decorators_changed(self, function: FunctionType) -> bool:
        """True when the decorators in the source of a function are no longer those that were applied to it."""
        module = self.module_of(function)
        versions = (module.old, module.new) if module is not None else ()
        found = [find_definition(version, function.__qualname__) for version in versions]
        lists = [[shape_of(d) for d in node.decorator_list] for node in found if isinstance(node, _FUNCTIONS)]
        return len(lists) == 2 and lists[0] != lists[1]

    def keeps_defaults(self, live: FunctionType, new: FunctionType) -> bool:
        """True when the defaults in the function's signature and what they read did not change."""
        module, found = self.module_of(new), self._definitions(live, new)
        if module is None or found is None:
            return False
        before, after = map(_defaults, found)
        if list(map(shape_of, before)) != list(map(shape_of, after)):
            return False
        reads = {root(read) for d in after for read in reads_of(ast.Expr(d)).now}
        if reads & self._local_names(module, new.__code__.co_qualname):
            return False
        return not any(self._dirty(module, ast.Expr(d)) for d in after)

    def _definitions(
        self, live: FunctionType, new: FunctionType
    ) -> list[ast.FunctionDef | ast.AsyncFunctionDef] | None:
        """The statements that defined a function, before and after; None where they cannot be told."""
        module = self.module_of(new)
        versions = ((module.old, live), (module.new, new)) if module is not None else ()
        found = []
        for version, function in versions:
            code = self._padding.get(function.__code__, function.__code__)
            named = [n for n in definitions_of(version, code.co_qualname) if isinstance(n, _FUNCTIONS)]
            if len(named) > 1:
                named = [n for n in named if first_line(n) == code.co_firstlineno]
            found += named[-1:]
        return found if len(found) == 2 else None

    def _local_names(self, module: ModuleInputs, qualname: str) -> set[str]:
        """Names around a function which may have other values now: of edited members, and of functions around it."""
        outer = qualname.rpartition(".")[0]
        members = set() if outer.endswith("<locals>") else self.edited_members(module, outer)
        return members | (_factory_names(module.new, qualname) if self.makers_ran else set())

    def unchanged_members(self, cls: type) -> set[str]:
        """The members of a class that its body defines as before, from unchanged inputs."""
        module = self.module_of(cls)
        if module is None:
            return set()
        node = find_definition(module.new, cls.__qualname__)
        if not isinstance(node, ast.ClassDef):
            return set()
        return _members(node).keys() - self.edited_members(module, cls.__qualname__)

    def edited_members(self, module: ModuleInputs, qualname: str) -> set[str]:
        """The names that a class body no longer binds, binds otherwise, or from other members that changed."""
        key = (module.name, qualname, self.makers_ran)
        known = self._member_edits.get(key)
        if known is not None:
            return known
        bodies = [_class_bodies(version, qualname) for version in (module.old, module.new)]
        before, after = (body[-1] if body else {} for body in bodies)
        if max(map(len, bodies)) > 1:  # which of them holds may differ before and after
            edited = {name for body in (*bodies[0], *bodies[1]) for name in body}
            self._member_edits[key] = edited
            return edited
        shapes = {name: [shape_of(node) for node in nodes] for name, nodes in before.items()}
        edited = before.keys() - after.keys()
        edited |= {name for name, nodes in after.items() if [shape_of(n) for n in nodes] != shapes.get(name)}
        edited |= {name for name, nodes in after.items() if any(self._dirty(module, node) for node in nodes)}
        cls = qualname.rpartition(".")[2]
        reads = {n: {mangled(root(r), cls) for node in nodes for r in reads_of(node).now} for n, nodes in after.items()}
        around = _factory_names(module.new, qualname) if self.makers_ran else set()
        grown = True
        while grown:
            more = {name for name in reads.keys() - edited if reads[name] & (edited | around)}
            edited |= more
            grown = bool(more)
        self._member_edits[key] = edited
        return edited

    def member_functions(self, cls: type) -> set[str]:
        """The members of a class that its body defines by one function statement, before and after."""
        module = self.module_of(cls)
        if module is None:
            return set()
        classes = [
            node
            for version in (module.old, module.new)
            for node in definitions_of(version, cls.__qualname__)
            if isinstance(node, ast.ClassDef)
        ]
        names = [
            {name for name, nodes in _members(node).items() if len(nodes) == 1 and isinstance(nodes[0], _FUNCTIONS)}
            for node in classes
        ]
        return set.intersection(*names) if names else set()

    def defined_members(self, cls: type) -> set[str]:
        """The members that the old class body and the statements after it defined."""
        module = self.module_of(cls)
        old = definitions_of(module.old, cls.__qualname__) if module is not None else []
        own = {name for node in old if isinstance(node, ast.ClassDef) for name in _members(node)}
        return own | self.members_at_load(cls)

    def members_at_load(self, value: Any) -> frozenset[str]:
        """The attributes that a class or function had when its module had run."""
        record = self._recorded.get(value.__module__)
        return record.members.get(value.__qualname__, frozenset()) if record is not None else frozenset()

    def _dirty(self, module: ModuleInputs, node: ast.stmt) -> bool:
        return self._inputs.is_any_dirty(module, reads_of(node))


def _defaults(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    return [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]


def find_definition(definitions: Definitions, qualname: str) -> ast.AST | None:
    """The last definition with this qualified name."""
    return next(reversed(definitions_of(definitions, qualname)), None)


def definitions_of(definitions: Definitions, qualname: str) -> list[DefinitionNode]:
    """All definitions with this qualified name, in source order."""
    scopes: list[Sequence[ast.AST]] = [[s.node for s in definitions.statements]]
    found: list[DefinitionNode] = []
    for part in qualname.split("."):
        if part == "<locals>":
            continue
        nodes = [node for scope in scopes for node in own_nodes(scope)]
        found = [n for n in nodes if isinstance(n, (*_FUNCTIONS, ast.ClassDef)) and n.name == part]
        scopes = [node.body for node in found]
    return sorted(found, key=lambda node: node.lineno)


def _class_bodies(definitions: Definitions, qualname: str) -> list[dict[str, list[ast.stmt]]]:
    nodes = definitions_of(definitions, qualname)
    return [_members(node, mutated=True) for node in nodes if isinstance(node, ast.ClassDef)]


def _factory_names(definitions: Definitions, qualname: str) -> set[str]:
    """The names that the functions around a definition bind."""
    factory = find_definition(definitions, qualname.rpartition(".<locals>")[0])
    names: set[str] = set()
    for node in ast.walk(factory) if factory is not None else ():
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _members(node: ast.ClassDef, *, mutated: bool = False) -> dict[str, list[ast.stmt]]:
    """The statements that bind each member; with `mutated` those that change what it holds, too."""
    members: dict[str, list[ast.stmt]] = {}
    for statement in node.body:
        reads = reads_of(statement)
        for name in reads.binds | reads.mutates if mutated else reads.binds:
            members.setdefault(mangled(name, node.name), []).append(statement)
    return members


def mangled(name: str, cls: str) -> str:
    """The name under which a class has a member: private ones get that of the class."""
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{cls.lstrip('_')}{name}" if is_private and cls.strip("_") else name
