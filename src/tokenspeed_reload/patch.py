"""One reload: execute, merge, substitute, look through the heap; undo all of it when anything fails."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from tokenspeed_reload import abstract, heap, running
from tokenspeed_reload.adapters.dispatch import GENERIC_FILE, forget_choices
from tokenspeed_reload.bindings import bind
from tokenspeed_reload.builtfrom import ABSENT, Print, print_of, print_of_value, prints_before
from tokenspeed_reload.codes import CodeMap
from tokenspeed_reload.definitions import DEFINING
from tokenspeed_reload.effects import Footprint
from tokenspeed_reload.errors import IncompleteUndo, ReloadError, StillRunning, describe
from tokenspeed_reload.execute import execute
from tokenspeed_reload.inputs import Inputs
from tokenspeed_reload.interrupts import uninterrupted
from tokenspeed_reload.loader import SourceFinder, within
from tokenspeed_reload.merge import REMOVED, Merge
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.named import names_of
from tokenspeed_reload.newmodules import NewModules
from tokenspeed_reload.outside import Outside
from tokenspeed_reload.records import Sources, pin
from tokenspeed_reload.remake import Remake
from tokenspeed_reload.report import Report
from tokenspeed_reload.runonce import RunOnce, has_cached_values
from tokenspeed_reload.stale import find_stale
from tokenspeed_reload.substitute import Substitution
from tokenspeed_reload.undo import (
    MISSING,
    ClassState,
    DictContents,
    FunctionState,
    LineCache,
    ParticipantState,
    UndoLog,
    kept_containers,
)
from tokenspeed_reload.values import home_told, is_a, is_atom, module_name

if TYPE_CHECKING:
    from tokenspeed_reload.reloader import Reloader

# Long enough that no other thread runs between two writes unless the edited code itself blocks.
_SWITCH_INTERVAL = 10.0


class _Gone:
    """Base of classes that no longer exist for the program."""


class Patch:
    """The work of one reload, from the analysis to an undo log that can be exchanged."""

    def __init__(
        self,
        reloader: Reloader,
        finder: SourceFinder,
        inputs: Inputs,
        codes: dict[str, CodeType],
        sources: Sources,
        padding: dict[CodeType, CodeType],
        report: Report,
        settle: Callable[[], None] | None,
        progress: Callable[[str], None] | None,
    ) -> None:
        self._settle = settle
        self._progress = progress
        self._thread = threading.get_ident()
        self._settling = False
        self._reloader = reloader
        self._finder = finder
        self._inputs = inputs
        self._codes = codes
        self._sources = sources
        self._report = report
        self._log = UndoLog()
        self._merge = Merge(self._log, reloader.adapters, inputs, padding, reloader.records.modules, sources.deleted)
        self._prefixes = [*reloader.packages, *reloader.watch]
        self._footprint = Footprint(self._prefixes)
        self._substitution = Substitution(self._merge, self._footprint.covers)
        self._new_modules = NewModules(self._prefixes, reloader.records)
        self._module = ""
        self._values_before: dict[str, Print] = {}
        self.built_from: dict[str, Print] = {}
        self._interval = 0.0
        self._first_write = 0

    def run(self) -> UndoLog:
        """Do all of it; raises ReloadError after undoing everything."""
        collecting, self._interval = gc.isenabled(), sys.getswitchinterval()
        gc.disable()
        sys.setswitchinterval(_SWITCH_INTERVAL)
        self._finder.serving = {**self._sources.unloaded, **self._sources.modules}
        self._finder.tell = self._tell_import
        try:
            self._apply()
        except BaseException as error:
            not_undone = self._undo()
            if self._settling or isinstance(error, KeyboardInterrupt | GeneratorExit | StillRunning):
                error.add_note(f"restart the program: {not_undone}") if not_undone else None
                raise
            raise self._failure(error, not_undone) from error
        finally:
            self._finder.serving = {}
            self._finder.tell = None
            sys.setswitchinterval(self._interval)
            if collecting:
                gc.enable()
        return self._log

    def _apply(self) -> None:
        if not self._inputs.modules:
            return
        records = self._reloader.records
        for participant in self._reloader.participants:
            self._log.add(ParticipantState(participant))
        self._new_modules.start()
        for library in self._merge.libraries:
            library.begin(self._merge)
        self._first_write = len(self._log)
        # Behind the libraries, some of which keep names of their own in the modules and take them away here.
        self._footprint.take([m for m in map(records.live, records.modules) if m is not None])
        for name in self._sources.deleted:
            self._withdraw_all(name)
        for name, module in self._inputs.modules.items():
            self._module = name
            self._prepare(module)
        self._wait_for_others()
        for name, module in self._inputs.modules.items():
            self._module = name
            self._one_module(module)
        with self._timed("merge"):
            self._finish()

    @property
    def left(self) -> set[str]:
        """The modules without a file of which a definition moved to another module."""
        return self._merge.left

    def _tell(self, what: str) -> None:
        if self._progress is not None:
            self._progress(what)

    def _tell_import(self, what: str) -> None:
        if threading.get_ident() == self._thread:
            self._tell(what)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Count the time to a phase; what is counted to another one inside of it is left out."""
        started, seconds = time.perf_counter(), self._report.seconds
        before = sum(seconds.values())
        try:
            yield
        finally:
            inner = sum(seconds.values()) - before
            seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started - inner

    def _wait_for_others(self) -> None:
        running.wait_for_others(self._merge.is_replaced, self._reloader.wait_s, self._interval)

    def _prepare(self, module: ModuleInputs) -> None:
        """Show the new text, and learn which code follows which."""
        record = self._reloader.records.modules[module.name]
        code = self._codes.get(module.name, record.code)
        self._merge.codes[record.source.path] = CodeMap(record.code, code)
        if code is record.code:
            return
        source = module.new.source
        for path in {record.source.path, source.path}:
            self._log.add(LineCache(path))
        pin(source)

    def _one_module(self, module: ModuleInputs) -> None:
        namespace: dict[str, Any] = vars(sys.modules[module.name])
        if not module.run and not module.removed and not module.cleared and module.name not in self._codes:
            return
        old = dict(namespace)
        self._log.once(DictContents, namespace)
        self._values_before |= {f"{module.name}.{n}": print_of_value(old.get(n)) for n in module.rebuilt}
        self._log_mutated(module)
        self._withdraw(module, old)
        self._drop_attributes(module)
        self._set_file(module, namespace)
        self._tell(f"the start of {module.name}")
        outside = Outside(module, self._reloader.records.modules)
        with self._timed("execute"):
            gc.collect(0)
            execute(module, namespace)
        self._merge.young.update((id(o), o) for o in gc.get_objects(generation=0))
        self._report.effects.extend(outside.effects())
        self._wait_for_others()  # it may have let other threads run
        self._tell(f"the run of {module.name}")
        with self._timed("merge"):
            bind(module, namespace, old, self._merge)
            self._note_removed(module, old)
            self._substitution.in_holders([*self._merge.young.values(), *self._merge.touched.values(), namespace])
            self._supersede(old)

    def _supersede(self, old_names: dict[str, Any]) -> None:
        """Put new classes and kernels in the place of those that could not be updated."""
        if not self._merge.superseded:
            return
        merge = self._merge

        def hidden() -> list[Any]:
            own = [old_names, merge.superseded, merge.patched, merge.touched, merge.new_of, merge.replaced]
            return [*own, *map(vars, merge.replaced), *self._kept()]

        with heap.thawed(), self._timed("scan"):
            self._substitution.supersede(merge.superseded, hidden)
        merge.superseded.clear()

    def _kept(self) -> list[Any]:
        """The containers in which the reload itself keeps what was before."""
        return [*kept_containers(self._log), *self._footprint.held_containers()]

    def _log_mutated(self, module: ModuleInputs) -> None:
        """Statements such as `f.x = 1` write to objects that stay: log these before they run."""
        statements = (*module.statements(), *module.dropped)
        for name in sorted({name for s in statements for name in s.reads.mutates}):
            value: Any = module.namespace.get(name)
            if not is_a(value, ModuleType | FunctionType | type):
                continue
            home = module_name(value) if is_a(value, ModuleType) else home_told(value)
            if not isinstance(home, str) or not within(home, self._prefixes):
                continue
            if is_a(value, ModuleType):
                self._log.once(DictContents, vars(value))
            elif is_a(value, FunctionType):
                self._log.once(FunctionState, value)
            elif is_a(value, type):
                self._log.once(ClassState, value)

    def _drop_attributes(self, module: ModuleInputs) -> None:
        """Take away what statements like `f.x = 1` set that are gone."""
        for name, attribute in sorted(module.lost):
            target = module.namespace.get(name)
            is_own = is_a(target, FunctionType | type) and target.__module__ == module.name
            if is_own and attribute in vars(target):
                delattr(target, attribute)
                self._merge.touch(target)

    def _withdraw(self, module: ModuleInputs, old: dict[str, Any]) -> None:
        """Let the registries forget what the definitions registered that run again, or are gone.

        What a module imports is not its own: the module that registered it need not run again.
        """
        again = {name for s in (*module.statements(), *module.dropped) for name in s.reads.binds} & old.keys()
        own = (n for n in sorted(again) if home_told(old[n]) == module.name or not module.old.imports(n))
        definitions = {name: old[name] for name in own}
        for participant in self._reloader.participants:
            participant.withdraw(module.name, definitions)

    def _withdraw_all(self, name: str) -> None:
        """A module whose file is gone stays as it runs, but offers nothing any more."""
        members = vars(sys.modules[name]).items() if name in sys.modules else ()
        definitions = {n: value for n, value in members if home_told(value) == name}
        for participant in self._reloader.participants:
            participant.withdraw(name, definitions)

    def _note_removed(self, module: ModuleInputs, old: dict[str, Any]) -> None:
        gone = module.removed | (module.cleared - vars(sys.modules[module.name]).keys())
        for name in sorted(gone & old.keys()):
            self._merge.bindings += 1
            self._merge.rebound.add((id(vars(sys.modules[module.name])), name))
            value = old[name]
            is_own = is_a(value, FunctionType | type) and value.__module__ == module.name
            # A decorator may have made another kind of object of a definition, such as a kernel.
            is_own = is_own or (not is_atom(value) and bool(module.old.kinds_of(name) & DEFINING))
            if is_own and id(value) not in self._merge.new_of:
                self._merge.replace(f"{module.name}.{name}", value, REMOVED)

    def _set_file(self, module: ModuleInputs, namespace: dict[str, Any]) -> None:
        """Let the module know its new file; it may have become a package, or be one no longer."""
        source = module.new.source
        if source.path == module.old.source.path or "__file__" not in namespace:
            return
        namespace["__file__"] = source.path
        if source.is_package == module.old.source.is_package:
            return
        spec = self._finder.spec_of(module.name, source, self._reloader.records.modules[module.name].origin)
        if spec is not None:
            namespace |= {"__spec__": spec, "__loader__": spec.loader, "__package__": spec.parent}
            if spec.submodule_search_locations is not None:
                namespace["__path__"] = spec.submodule_search_locations
            else:
                namespace.pop("__path__", None)

    def _finish(self) -> None:
        merge = self._merge
        self._new_modules.log_into(self._log)
        with heap.thawed():
            self._remake()
            changed = self._footprint.changed()
            self._footprint.drop_moved(merge.live_of)
            self._substitution.in_holders(changed)
            del changed
            suspects = self._substitution.held_elsewhere()
            if suspects:
                own = [merge.discarded, merge.new_of, merge.young, *merge.young.values()]
                self._tell("the merge of all modules")
                with self._timed("scan"):
                    self._substitution.in_process(suspects, lambda: {*map(id, own), id(own), *map(id, self._kept())})
                del own
            del suspects
            self._tell("the merge of all modules")
            kinds = {heap.CACHED_FUNCTION, *running.kinds(), *abstract.kinds()}
            kinds |= {kind for library in merge.libraries for kind in library.kinds()}
            with self._timed("scan"):
                survey = heap.Survey({*merge.codes.keys(), GENERIC_FILE}, kinds)
            self._tell("the look at all objects of the process")
            heap.update_functions(survey, merge)
            self._report.running.extend(running.suspended(survey.others, merge.is_replaced))
            abstract.update_abstract(survey.others, merge)
            forget_choices(survey.functions, merge)
            heap.finish_libraries([*survey.functions, *survey.others], merge)
            del survey
            self._footprint.without_repeats({id(live) for live in merge.live_of.values()})
            self._footprint.log_into(self._log, self._first_write)
            self._report.objects_patched = len(merge.patched) + merge.bindings
            self._report.patched, self._report.redirected = names_of(merge.patched.values(), self._inputs.modules)
            self._note_run_once()
            if self._settle is not None:
                self._settling = True
                self._settle()
                self._settling = False
            merge.replaced[:] = [e for e in merge.replaced if e.is_part or id(e.old) not in merge.new_of]
            self._drop_helpers()
            # What was executed and not kept must go before it is frozen with the rest: frozen, it would stay for
            # good, and the next reload would take it for a holder. All older objects are in generation 2 here.
            gc.collect(1)
            if merge.replaced:
                with self._timed("scan"):
                    self._report.stale.extend(find_stale(merge.replaced, self._kept(), self._tell))
                self._detach()
        self._report.running.extend(running.own_frames(merge.is_replaced))
        self._report.stale.extend(self._reloader.bystanders.stale(self._inputs, self._changed_values()))
        self._report.needs_restart.extend(merge.needs_restart)
        self._report.effects.extend(merge.effects)
        self._report.notes.extend(merge.notes)

    def _changed_values(self) -> dict[tuple[str, str], Any]:
        """The names of values that stand for another one now, each with its constant of before."""
        rebound = self._merge.rebound
        changed: dict[tuple[str, str], Any] = dict.fromkeys(self._merge.new_values, MISSING)
        for name, module in self._inputs.modules.items():
            names = module.value_names | module.removed
            changed |= {(name, n): MISSING for n in names if (id(module.namespace), n) in rebound}
        return changed | {key: constant.value for key, constant in self._merge.constants.items()}

    def _remake(self) -> None:
        """Update what functions made before: members of local classes, defaults of closures."""
        remake = Remake(self._merge)
        if not remake.is_due:
            return
        with self._timed("scan"):
            made = self._made()
            if not remake.names(made):
                return
            del made
            gc.collect()  # classes are part of cycles: what is left then is held by something
            made = self._made()
        remake.run(made)
        del made
        self._substitution.in_holders([*self._merge.young.values(), *self._merge.touched.values()])
        self._supersede({})

    def _made(self) -> heap.Made:
        return heap.Made(self._merge.codes.keys(), {*self._inputs.modules, "types"})

    def _detach(self) -> None:
        """Take classes that are gone, and that only the undo log holds, out of the subclasses of their bases."""
        for entry in self._merge.replaced:
            if is_a(entry.old, type) and not entry.is_held and not entry.is_part:
                with contextlib.suppress(TypeError):  # of another layout
                    self._log.once(ClassState, entry.old)
                    entry.old.__bases__ = (_Gone,)

    def _note_run_once(self) -> None:
        """Name the edits whose effect is only in what was built before this reload."""
        merge, reloader = self._merge, self._reloader
        once = reloader.run_once(self._inputs)
        functions_before = prints_before(self._log)
        for edit in merge.edited:
            function = edit.function
            if has_cached_values(function):
                name = f"{function.__module__}.{function.__qualname__}"
                merge.restart(name, RunOnce.WHY_KEPT)
            elif once.function(function, function.__globals__):
                now = print_of(function)
                before = ABSENT if edit.kind == "added" else functions_before.get(id(function), now)
                if self._is_news(edit.where, before, ABSENT if edit.kind == "removed" else now):
                    merge.restart(edit.where, RunOnce.WHY)
        for module, name in merge.new_values:
            if once.value(name):
                where, value = f"{module}.{name}", vars(sys.modules[module]).get(name)
                if self._is_news(where, self._values_before.get(where, ABSENT), print_of_value(value)):
                    merge.restart(where, RunOnce.WHY_VALUE)

    def _is_news(self, where: str, before: Print, now: Print) -> bool:
        """True unless what ran once did so with what is there now."""
        first = self.built_from.setdefault(where, self._reloader.built_from.first(where, before))
        return first != now

    def _drop_helpers(self) -> None:
        merge = self._merge
        for held in (merge.young, merge.live_of, merge.new_of, merge.touched, merge.patched, merge.pinned):
            held.clear()
        merge.discarded.clear()
        merge.edited.clear()
        self._footprint = Footprint(self._prefixes)
        self._substitution = Substitution(merge, self._footprint.covers)

    def _undo(self) -> list[str]:
        """Undo all; returns what failed on the way, as "Type: message"."""
        failures: list[str] = []
        with uninterrupted():
            for step in (
                lambda: self._new_modules.log_into(self._log),
                lambda: self._footprint.log_into(self._log, self._first_write),
                self._log.exchange,
            ):
                try:
                    step()
                except IncompleteUndo as error:
                    failures.extend(error.errors)
                except Exception as error:
                    failures.append(describe(error))
            self._log.clear()
        return failures

    def _failure(self, error: BaseException, not_undone: list[str]) -> ReloadError:
        message = describe(error)
        file: str | None
        if isinstance(error, SyntaxError) and error.filename:
            text = error.text.strip() if error.text else None
            file, line = error.filename, error.lineno
        else:
            file, line = self._place(error.__traceback__)
            text = self._text(file, line)
        where: dict[str, Any] = {"module": self._module, "file": file, "line": line, "text": text}
        return ReloadError("patch", message, **where, not_undone=not_undone)

    def _place(self, trace: TracebackType | None) -> tuple[str | None, int | None]:
        """The innermost line of the recorded modules in a traceback."""
        file: str | None = None
        line: int | None = None
        paths = {r.source.path for r in self._reloader.records.modules.values()}
        paths |= {s.path for s in (*self._sources.modules.values(), *self._sources.unloaded.values())}
        while trace is not None:
            if trace.tb_frame.f_code.co_filename in paths:
                file, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
            trace = trace.tb_next
        return file, line

    def _text(self, file: str | None, line: int | None) -> str | None:
        sources = (*self._sources.modules.values(), *self._sources.unloaded.values())
        recorded = [record.source for record in self._reloader.records.modules.values()]
        source = next((s for s in (*sources, *recorded) if s.path == file), None)
        return source.line(line) if source is not None else None
