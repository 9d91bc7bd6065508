"""What a plan and a reload tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any


@dataclass(frozen=True)
class ReloadedModule:
    """A module of the reload.

    Attributes:
        name: its name.
        why: "edited", "named" or "uses <module>".
    """

    name: str
    why: str


@dataclass(frozen=True)
class Stale:
    """An old object that something still holds.

    Attributes:
        definition: the dotted name of what it was.
        why: why it could not be updated.
        held_by: the places that hold it, in words.
    """

    definition: str
    why: str
    held_by: list[str]


@dataclass(frozen=True)
class NeedsRestart:
    """An edit whose effect comes with a restart only.

    Attributes:
        what: the module, or the dotted name of the definition.
        why: the reason, as a sentence.
    """

    what: str
    why: str


@dataclass(frozen=True)
class Running:
    """Old code that goes on until it ends by itself.

    Attributes:
        what: the dotted name of the function.
        where: the thread, generator, coroutine or task that runs it, in words.
        line: the line, in the old text, at which it is.
    """

    what: str
    where: str
    line: int


@dataclass(frozen=True)
class Effect:
    """Something that a module did when it ran which an undo does not take back.

    Attributes:
        module: the module.
        what: what was done, as a sentence.
    """

    module: str
    what: str


@dataclass(frozen=True)
class ChangedKernel:
    """A kernel that compiles anew.

    Attributes:
        kernel: the live one.
        before: its attributes before the reload, with the binaries of then.
    """

    kernel: Any
    before: Mapping[str, Any] = field(repr=False)

    @property
    def name(self) -> str:
        """Its dotted name."""
        return kernel_name(self.kernel)


def kernel_name(kernel: Any) -> str:
    """The dotted name of the function inside of a kernel, whatever is wrapped around it."""
    while type(kernel) is not FunctionType and "fn" in vars(kernel):
        kernel = kernel.fn
    return f"{kernel.__module__}.{getattr(kernel, '__qualname__', type(kernel).__name__)}"


@dataclass
class Bodies:
    """What changed.

    Attributes:
        functions: functions of Python whose body is another one; what they take and what they hold is as before.
        kernels: kernels that compile anew since their body, or what they call on the device, is another one.
        beyond: what else changed, as clauses; empty where that is all.
    """

    functions: list[FunctionType] = field(default_factory=list)
    kernels: list[ChangedKernel] = field(default_factory=list)
    beyond: list[str] = field(default_factory=list)


@dataclass
class Report:
    """The outcome of a reload.

    Attributes:
        modules: the modules of the reload, providers before users.
        pending: changed modules that were left for later.
        objects_patched: how many live objects and module names took new content.
        patched: the functions and classes of the modules among these, as dotted names.
        redirected: functions of the modules that call a new one, since they cannot hold its closure.
        stale: old objects that could not follow, and who holds them.
        needs_restart: edits whose effect comes with a restart only.
        running: old code that still runs.
        effects: what the modules did outside of what an undo covers.
        notes: whatever else the person who edits should know, as sentences.
        bodies: what changed, where that is only code inside of functions and kernels.
        seconds: time spent in "plan", "execute", "merge", and in "scan", the pass over all objects of the process.
    """

    modules: list[ReloadedModule] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    objects_patched: int = 0
    patched: list[str] = field(default_factory=list)
    redirected: list[str] = field(default_factory=list)
    stale: list[Stale] = field(default_factory=list)
    needs_restart: list[NeedsRestart] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bodies: Bodies = field(default_factory=Bodies)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Plan:
    """What a reload would do.

    It is told without running anything: what a statement will give is not known, only that it would run. What
    decorators and calls make of a definition, and which branch of a condition runs, is therefore told by the report
    alone; a definition that runs again from other inputs is taken to change.

    Attributes:
        modules: the modules that it would execute, providers before users.
        statements: for each of them the top-level names that it would define anew.
        removed: for each of them the names that it would delete.
        patched: live functions and classes that would be updated in place, as dotted names.
        redirected: live functions that would call a new one, since they cannot hold its closure.
        stale: old objects that could not follow, and who holds them now.
        running: old code that runs now; other threads would be waited for.
        pending: changed modules that it would leave.
        needs_restart: edits whose effect comes with a restart only.
        notes: whatever else the person who edits should know, as sentences.
    """

    modules: list[ReloadedModule] = field(default_factory=list)
    statements: dict[str, list[str]] = field(default_factory=dict)
    removed: dict[str, list[str]] = field(default_factory=dict)
    patched: list[str] = field(default_factory=list)
    redirected: list[str] = field(default_factory=list)
    stale: list[Stale] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    needs_restart: list[NeedsRestart] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
