"""The merge of newly executed objects into the live ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, Literal, Protocol, runtime_checkable

from tokenspeed_reload.codes import CodeMap, is_redirection, redirect
from tokenspeed_reload.comparison import Comparison
from tokenspeed_reload.definitions import Definitions
from tokenspeed_reload.inputs import Inputs
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.records import ModuleRecord
from tokenspeed_reload.report import Effect, NeedsRestart
from tokenspeed_reload.undo import FunctionState, UndoLog, cell_value
from tokenspeed_reload.values import is_a, same_value

REMOVED = "it was removed"
NEW_CELLS = "its closure needs values that only a new call of its maker gives"


class Adapter(Protocol):
    """How one kind of object is updated in place. Adapters are asked in order; the first that matches acts."""

    def matches(self, live: Any, new: Any, merge: Merge) -> bool:
        """True when `live` can take over what `new` is."""

    def merge(self, live: Any, new: Any, where: str, merge: Merge) -> Any:
        """Update `live`, logging each write, and return the object that stays: `live`, or else `new`."""


@runtime_checkable
class LibraryAdapter(Adapter, Protocol):
    """An adapter of a library whose objects keep state about code, compiled kernels for instance."""

    def begin(self, merge: Merge) -> None:
        """Called before the first module is executed."""

    def wraps(self, value: Any) -> bool:
        """True when `value` stands for a definition, so that `NAME = make(f)` updates what NAME held."""

    def kinds(self) -> set[type]:
        """The classes whose instances, anywhere in the process, `finish` is to see."""

    def finish(self, objects: list[Any], merge: Merge) -> None:
        """Called when all modules are merged, with the objects of `kinds` that exist."""


@dataclass
class Replaced:
    """An old object that could not follow: whoever holds it is stale.

    Attributes:
        definition: the dotted name of what it was.
        old: the object.
        why: the reason as a sentence.
        is_held: True when something is known to hold it, even where no name for that is found.
        is_part: only a part of the object is stale, which goes on for the rest.
        goes_on: it is right where it is defined, and where that is imported.
    """

    definition: str
    old: Any
    why: str
    is_held: bool = False
    is_part: bool = False
    goes_on: bool = False


@dataclass(frozen=True)
class Edit:
    """A function that an edit changed, added to a class, or took from it."""

    where: str
    function: FunctionType
    kind: Literal["changed", "added", "removed"] = "changed"


@dataclass(frozen=True)
class Constant:
    """The value that a name had before the reload."""

    value: Any


@dataclass
class Merge:
    """The state of one reload while new objects are merged into live ones.

    Attributes:
        log: where each write is recorded before it is made.
        adapters: the kinds of objects that can be updated, in the order in which they are asked.
        inputs: the analysis of all modules of the reload.
        recorded: what is known of the modules, by name.
        gone: names of the modules whose file is gone.
        left: those of them of which a definition moved to another module.
        padding: code objects with unused nonlocal names, each with the plain code that it stands for.
        codes: for each source file, which code objects follow which.
        edited: live functions that behave differently now, each after its dotted name.
        new_values: module-level values that are no longer what they were, as (module, name).
        pinned: functions that keep their old code, though there is newer.
        effects: what the modules did outside of what an undo covers.
        kept: what adapters of libraries keep from `begin` to `finish`; it goes with a reload that fails in between.
        libraries: those of the adapters that keep an eye on a library.
        superseded: objects that a new one is still to take the place of, each with that.
        successors: all of these new ones, by identity of the old one.
        keeping: the classes among the old ones whose objects cannot move, by identity.
        rebound: the places whose binding changed, as (id of the namespace, name).
        comparison: what the sources tell of definitions.
    """

    log: UndoLog
    adapters: Sequence[Adapter]
    inputs: Inputs
    padding: dict[CodeType, CodeType]
    recorded: Mapping[str, ModuleRecord] = field(default_factory=dict)
    gone: Collection[str] = ()
    left: set[str] = field(default_factory=set)
    codes: dict[str, CodeMap] = field(default_factory=dict)
    forced: set[tuple[int, int]] = field(default_factory=set)
    young: dict[int, Any] = field(default_factory=dict)
    live_of: dict[int, Any] = field(default_factory=dict)
    new_of: dict[int, Any] = field(default_factory=dict)
    discarded: list[Any] = field(default_factory=list)
    touched: dict[int, Any] = field(default_factory=dict)
    patched: dict[int, Any] = field(default_factory=dict)
    replaced: list[Replaced] = field(default_factory=list)
    needs_restart: list[NeedsRestart] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    edited: list[Edit] = field(default_factory=list)
    new_values: list[tuple[str, str]] = field(default_factory=list)
    constants: dict[tuple[str, str], Constant] = field(default_factory=dict)
    superseded: list[tuple[Any, Any]] = field(default_factory=list)
    successors: dict[int, Any] = field(default_factory=dict)
    keeping: set[int] = field(default_factory=set)
    rebound: set[tuple[int, str]] = field(default_factory=set)
    bindings: int = 0
    pinned: dict[int, FunctionType] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    kept: dict[Adapter, Any] = field(default_factory=dict)
    libraries: list[LibraryAdapter] = field(init=False)
    comparison: Comparison = field(init=False)

    def __post_init__(self) -> None:
        self.comparison = Comparison(self.inputs, self.padding, self.recorded)
        self.libraries = [adapter for adapter in self.adapters if isinstance(adapter, LibraryAdapter)]

    def merge(self, live: Any, new: Any, where: str) -> Any:
        """Let `live` take over `new` if some adapter can, and return the object that stays."""
        if live is new or id(new) in self.live_of:
            return self.resolve(new)
        if same_value(live, new):
            return live
        if id(live) in self.new_of or id(new) not in self.young:
            return new  # `live` follows another new object, or `new` existed before
        for adapter in self.adapters:
            if adapter.matches(live, new, self):
                return adapter.merge(live, new, where, self)
        return new

    def resolve(self, value: Any) -> Any:
        """The live object that took over `value`, or `value` itself."""
        live = self.live_of.get(id(value), value)
        if live is value and type(value) is tuple and any(self.resolve(item) is not item for item in value):
            return tuple(self.resolve(item) for item in value)
        return live

    def resolved(self, annotations: Mapping[str, Any]) -> dict[str, Any]:
        """A new dict of annotations with the live objects; it takes part when what they are made of follows later."""
        found = {name: self.resolve(value) for name, value in annotations.items()}
        self.young[id(found)] = found
        return found

    def follow(self, live: Any, new: Any) -> None:
        """Note that `live` takes over `new`, which is discarded."""
        self.live_of[id(new)] = live
        self.new_of[id(live)] = new
        self.discarded.append(new)

    def touch(self, target: Any, *, counts: bool = True) -> None:
        """Note that `target` was written to; `counts` is False when only line numbers moved."""
        self.touched[id(target)] = target
        if counts:
            self.patched[id(target)] = target

    @property
    def classes_changed(self) -> bool:
        """True once a class was written to."""
        return any(is_a(value, type) for value in self.touched.values())

    def supersede(self, live: Any, new: Any, *, keeps_objects: bool = False) -> None:
        """Note that `new` shall take the place of `live` in whatever holds it, but for the objects that keep it."""
        if keeps_objects:
            self.keeping.add(id(live))
        self.superseded.append((live, new))
        self.successors[id(live)] = new
        self.touch(live)

    def replace(self, definition: str, old: Any, why: str, *, is_held: bool = False, goes_on: bool = False) -> None:
        """Note that `old` could not be updated."""
        self.replaced.append(Replaced(definition, old, why, is_held, goes_on=goes_on))

    def part(self, definition: str, held: Any, why: str) -> None:
        """Note that `held` was updated but for what `definition` names."""
        known = any(entry.definition == definition and entry.old is held for entry in self.replaced)
        if not known:
            self.replaced.append(Replaced(definition, held, why, is_held=True, is_part=True))

    def restart(self, what: str, why: str) -> None:
        """Note an edit whose effect comes with a restart only."""
        entry = NeedsRestart(what, why)
        if entry not in self.needs_restart:
            self.needs_restart.append(entry)

    def effect(self, module: str, what: str) -> None:
        """Note something that an undo does not take back."""
        entry = Effect(module, what)
        if entry not in self.effects:
            self.effects.append(entry)

    def merge_definition(self, live: Any, new: Any, where: str) -> Any:
        """Merge what one definition statement bound before and after, even where its kind of object changed."""
        self.forced.add((id(live), id(new)))
        stays = self.merge(live, new, where)
        if stays is not new or same_value(live, new):
            return stays
        if type(live) is FunctionType and callable(new) and id(new) in self.young:
            self.redirect(live, new)
        return stays

    def redirect(self, live: FunctionType, target: Any) -> None:
        """Let whoever calls `live` call `target`."""
        self.log.once(FunctionState, live)
        redirect(live, target)
        self.touch(live)

    def same_definition(self, live: FunctionType, new: FunctionType) -> bool:
        """True when two function objects come from one definition, before and after."""
        if (id(live), id(new)) in self.forced:
            return True
        if live.__globals__ is new.__globals__ and live.__qualname__ == new.__qualname__:
            return True
        return live.__code__ == new.__code__ or self.follower(live.__code__) == new.__code__

    def follower(self, code: CodeType) -> CodeType | None:
        """The new code that follows an old one, or None."""
        codes = self.codes.get(code.co_filename)
        return codes.follower(self.padding.get(code, code)) if codes is not None else None

    def runs_new_code(self, function: FunctionType) -> bool:
        """True for a function that this reload made or updated.

        Its code may equal that of another function which stood on the same line before.
        """
        if id(function) not in self.young and id(function) not in self.touched:
            return False
        codes = self.codes.get(function.__code__.co_filename)
        return codes is not None and codes.is_new(self.padding.get(function.__code__, function.__code__))

    def is_replaced(self, code: CodeType) -> bool:
        """True for code that the reload replaces by other code, or removes."""
        codes = self.codes.get(code.co_filename)
        return codes is not None and codes.is_replaced(self.padding.get(code, code))

    def is_old_code(self, value: Any) -> bool:
        """True when `value` is a function that the old version of a reloaded module defined."""
        if type(value) is not FunctionType:
            return False
        code = self.padding.get(value.__code__, value.__code__)
        codes = self.codes.get(code.co_filename)
        return is_redirection(value) or (codes is not None and code in codes)

    def is_own(self, value: Any, module: ModuleInputs, depth: int = 4) -> bool:
        """True when a definition of `module` made `value`, directly or inside of what decorators put around it."""
        if is_a(value, type):
            return value.__module__ == module.name
        if type(value) is not FunctionType:
            return True
        if is_redirection(value):
            return value.__globals__ is module.namespace
        if value.__code__.co_filename == module.old.source.path and self.is_old_code(value):
            return True
        if value.__module__ == module.name and any(library.wraps(value) for library in self.libraries):
            return True  # a library may have put code of its own into it
        inner = [value.__dict__.get("__wrapped__"), *(cell_value(c) for c in value.__closure__ or ())]
        return depth > 0 and any(type(v) is FunctionType and self.is_own(v, module, depth - 1) for v in inner)

    def note_padding(self, code: CodeType, plain: CodeType) -> None:
        """Remember that `code` is `plain` with unused nonlocal names."""
        if code is not plain:
            self.padding[code] = plain

    def codes_of(self, module: ModuleInputs) -> CodeMap:
        """The code of a module before and after."""
        return self.codes[module.old.source.path]

    def definitions_for(self, code: CodeType) -> Definitions | None:
        """The new source in which new code stands. Old code may stand in another file, such as an overlay's."""
        path = code.co_filename
        return next((m.new for m in self.inputs.modules.values() if m.new.source.path == path), None)

    def module_of(self, value: Any) -> ModuleInputs | None:
        """The module of this reload in which a function or class was defined."""
        name = value.__globals__.get("__name__") if is_a(value, FunctionType) else value.__module__
        return self.inputs.modules.get(name or "")
