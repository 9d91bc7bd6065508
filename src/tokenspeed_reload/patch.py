"""One reload: execute, merge, substitute, look through the heap; undo all of it when anything fails."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any

from tokenspeed_reload import abstract, heap, running
from tokenspeed_reload.adapters.dispatch import GENERIC_FILE, forget_choices
from tokenspeed_reload.bindings import bind
from tokenspeed_reload.bodies import bodies_of
from tokenspeed_reload.builtfrom import Print
from tokenspeed_reload.derived import Derived
from tokenspeed_reload.effects import Footprint
from tokenspeed_reload.errors import IncompleteUndo, StillRunning, describe
from tokenspeed_reload.execute import execute
from tokenspeed_reload.failures import chain_of, failure_of
from tokenspeed_reload.gone import FORGOTTEN, ForgottenModule, Remains, forget, remains_of
from tokenspeed_reload.inputs import Inputs
from tokenspeed_reload.interrupts import uninterrupted
from tokenspeed_reload.loader import SourceFinder
from tokenspeed_reload.merge import Merge
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.moduleupdate import ModuleUpdate
from tokenspeed_reload.named import names_of
from tokenspeed_reload.newmodules import NewModules
from tokenspeed_reload.outside import Outside
from tokenspeed_reload.records import Sources
from tokenspeed_reload.remake import Remake
from tokenspeed_reload.report import Report, Stale
from tokenspeed_reload.restarts import Restarts
from tokenspeed_reload.stale import find_stale
from tokenspeed_reload.substitute import Substitution
from tokenspeed_reload.undo import (
    MISSING,
    DictContents,
    ParticipantState,
    UndoLog,
    kept_containers,
)
from tokenspeed_reload.values import attributes_of, home_told

if TYPE_CHECKING:
    from tokenspeed_reload.reloader import Reloader

# Long enough that no other thread runs between two writes unless the edited code itself blocks.
_SWITCH_INTERVAL = 10.0


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
        tell: Callable[[str], None],
    ) -> None:
        self._settle = settle
        self._tell = tell
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
        self._derived = Derived(self._prefixes)
        self._restarts = Restarts(self._merge, reloader.built_from)
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
            not_undone = self._undo(error)
            is_own = self._settling or isinstance(error, KeyboardInterrupt | GeneratorExit | StillRunning)
            if is_own and not not_undone:
                raise
            records = self._reloader.records.modules.values()
            sources = [*self._sources.modules.values(), *self._sources.unloaded.values(), *(r.source for r in records)]
            raise failure_of(error, self._module, sources, not_undone) from error
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
        for name in forget(self._sources.unused, self._reloader.everyone(), self._log):
            self._report.notes.append(FORGOTTEN.format(name))
        self._new_modules.start()
        for library in self._merge.libraries:
            library.begin(self._merge)
        self._first_write = len(self._log)
        # Behind the libraries, some of which keep names of their own in the modules and take them away here.
        self._footprint.take([m for m in map(records.live, records.modules) if m is not None])
        self._derived.start(self._footprint.classes())
        for name in self._sources.deleted:
            self._withdraw(name, self._definitions_of(name))  # it stays as it runs, and offers nothing
        for name, module in self._inputs.modules.items():
            self._module = name
            self._update(module).show(self._codes.get(name, self._reloader.records.modules[name].code))
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

    @property
    def built_from(self) -> dict[str, Print]:
        """The prints of what ran once and is edited now, at the time when it ran."""
        return self._restarts.built_from

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

    def _one_module(self, module: ModuleInputs) -> None:
        namespace: dict[str, Any] = vars(sys.modules[module.name])
        if not module.run and not module.removed and not module.cleared and module.name not in self._codes:
            return
        old, update = dict(namespace), self._update(module)
        self._log.once(DictContents, namespace)
        self._restarts.see(module, old)
        update.log_mutated(self._prefixes)
        self._withdraw(module.name, update.definitions_due(old))
        update.drop_attributes()
        update.set_file(self._finder)
        self._tell(f"the start of {module.name}")
        outside = Outside(module, self._reloader.records.modules)
        with self._timed("execute"):
            gc.collect(0)
            try:
                execute(module, namespace)
            finally:
                self._merge.young.update((id(o), o) for o in gc.get_objects(generation=0))
        self._report.effects.extend(outside.effects())
        self._wait_for_others()  # it may have let other threads run
        self._tell(f"the run of {module.name}")
        with self._timed("merge"):
            bind(module, namespace, old, self._merge)
            update.note_removed(old)
            self._substitution.in_holders([*self._merge.young.values(), *self._merge.touched.values(), namespace])
            self._supersede(old)

    def _update(self, module: ModuleInputs) -> ModuleUpdate:
        record = self._reloader.records.modules[module.name]
        return ModuleUpdate(module, record, vars(sys.modules[module.name]), self._merge)

    def _definitions_of(self, name: str) -> dict[str, Any]:
        members = vars(sys.modules[name]) if name in sys.modules else {}
        return {n: value for n, value in members.items() if home_told(value) == name}

    def _withdraw(self, module: str, definitions: dict[str, Any]) -> None:
        """Let the registries forget what these definitions of a module registered."""
        for participant in self._reloader.participants:
            participant.withdraw(module, definitions)

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
            self._restarts.note(self._reloader.run_once(self._inputs))
            if self._settle is not None:
                self._settling = True
                self._settle()
                self._settling = False
            merge.replaced[:] = [e for e in merge.replaced if e.is_part or e.goes_on or id(e.old) not in merge.new_of]
            self._derived.sort(merge)
            nobodys = {id(attributes_of(value)) for value in (*merge.discarded, *self._reloader.restless)}
            self._drop_helpers()
            # What was executed and not kept must go before it is frozen with the rest: frozen, it would stay for
            # good, and the next reload would take it for a holder. All older objects are in generation 2 here.
            gc.collect(1)
            if self._derived.has_discarded or merge.replaced:
                with self._timed("scan"):
                    # A pass over all objects has aged the discarded classes, which their bases know as long as they
                    # exist; and a reload that failed has left cycles that look like holders.
                    gc.collect()
            if merge.replaced:
                with self._timed("scan"):
                    hidden = self._kept()
                    hidden += self._remains(hidden).alone.values()
                    self._report.stale.extend(find_stale(merge.replaced, hidden, merge.recorded, self._tell))
                    del hidden
                self._derived.detach(merge)
            self._derived.log_into(self._log, self._first_write)
        self._report.running.extend(running.own_frames(merge.is_replaced))
        self._report.stale.extend(self._bystanders())
        self._report.needs_restart.extend(merge.needs_restart)
        self._report.effects.extend(merge.effects)
        self._report.notes.extend(merge.notes)
        self._report.bodies = bodies_of(self._log, nobodys)

    def _remains(self, kept: list[Any]) -> Remains:
        """The modules that have no file and that nothing uses any more, apart from what the reload has `kept`."""
        gone = [name for name in self._sources.deleted if name in sys.modules]
        new = {name: module.new.source for name, module in self._inputs.modules.items()}
        names = sorted(self._reloader.gone.without_users(gone, new))
        forgotten = [record.module for record in self._log if isinstance(record, ForgottenModule)]
        modules = [*(sys.modules[name] for name in names), *forgotten]
        # Of the records and entries either the objects or their dicts hold what they have, by the version of CPython.
        own = [*self._log, *self._merge.replaced]
        return remains_of(modules, [*kept, *own, *map(vars, own), own, forgotten])

    def _bystanders(self) -> list[Stale]:
        """What holds an old value in modules that took no part; of those without a file, in what something uses."""
        changed = self._changed_values()
        gone = self._sources.deleted if changed else []
        remains = self._remains(self._kept()) if gone else Remains({}, set())
        unused = {name for name in gone if id(sys.modules.get(name)) in remains.alone} - remains.needed
        return self._reloader.bystanders.stale(self._inputs, changed, unused)

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

    def _drop_helpers(self) -> None:
        merge = self._merge
        for held in (merge.young, merge.live_of, merge.new_of, merge.touched, merge.patched, merge.pinned):
            held.clear()
        merge.discarded.clear()
        merge.edited.clear()
        self._footprint = Footprint(self._prefixes)
        self._substitution = Substitution(merge, self._footprint.covers)

    def _undo(self, error: BaseException) -> list[str]:
        """Undo all; returns what failed on the way, as "Type: message"."""
        failures: list[str] = []
        with uninterrupted():
            for step in (
                lambda: self._new_modules.log_into(self._log),
                lambda: self._footprint.log_into(self._log, self._first_write),
                lambda: self._derived.sort(self._merge),
                lambda: self._derived.log_failed(self._log, self._first_write, set(map(type, chain_of(error)))),
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
