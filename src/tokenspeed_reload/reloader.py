"""The reloader: what it watches, what changed, and the start of a reload."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, ModuleType
from typing import TypeVar

from tokenspeed_reload.adapters import default_adapters
from tokenspeed_reload.builtfrom import BuiltFrom
from tokenspeed_reload.bystanders import Bystanders
from tokenspeed_reload.definitions import Definitions, parse
from tokenspeed_reload.dependencies import Uses, import_edges, ordered, providers_of, used_by_objects
from tokenspeed_reload.disk import Disk
from tokenspeed_reload.errors import ReloadError, ReloadInProgress, UnknownModules, describe
from tokenspeed_reload.gone import TO_FORGET, Gone
from tokenspeed_reload.inputs import Inputs
from tokenspeed_reload.loader import SourceFinder, compile_source, within
from tokenspeed_reload.merge import Adapter, Merge
from tokenspeed_reload.moduleinputs import ModuleInputs, tried_imports
from tokenspeed_reload.patch import Patch
from tokenspeed_reload.plan import Planner
from tokenspeed_reload.records import Change, Origin, Records, Sources, SourceText
from tokenspeed_reload.report import NeedsRestart, Plan, ReloadedModule, Report
from tokenspeed_reload.runonce import RunOnce, uses_in
from tokenspeed_reload.transaction import Transaction
from tokenspeed_reload.undo import Participant, UndoLog

Result = TypeVar("Result")

RUNS_ONCE = frozenset({"__init__", "__post_init__", "load_weights", "process_weights"})


class Reloader:
    """Reloads edited modules of a running program in place.

    Args:
        packages: names of the packages and modules that can be reloaded, with all below them.
        watch: names of packages that are recorded too: their edits are reported, and can be forced by name.
        overlay: a directory, laid out as the packages, whose files are taken before the installed ones.
        adapters: how further kinds of objects are updated in place; asked before the built-in ones.
        participants: registries and the like that want their own state restored on an undo.
        runs_once: names of functions that run once, `*` standing for anything: an edit of them, or of what only
            they use, is reported, since its effect is in what they built.
        built_by: names of packages and modules whose whole code runs once.
        restless: objects that change by themselves, reload or not: that they did says nothing of an edit.
        beside: names of packages that are neither reloaded nor recorded, since other processes or the program
            around run them: their edits are reported. What of them is named elsewhere here is left out.
        wait_s: longest to wait for other threads that run code which is to be replaced.
    """

    def __init__(
        self,
        packages: Iterable[str],
        watch: Iterable[str] = (),
        overlay: Path | None = None,
        adapters: Sequence[Adapter] = (),
        participants: Sequence[Participant] = (),
        runs_once: Iterable[str] = RUNS_ONCE,
        built_by: Iterable[str] = (),
        wait_s: float = 1.0,
        beside: Iterable[str] = (),
        restless: Sequence[object] = (),
    ) -> None:
        self.packages = list(packages)
        self.watch = list(watch)
        self.adapters = [*adapters, *default_adapters()]
        self.participants = list(participants)
        self.runs_once = frozenset(runs_once)
        self.built_by = list(built_by)
        self.wait_s = wait_s
        self.beside = list(beside)
        self.restless = restless
        self.records = Records()
        self._finder = SourceFinder([*self.packages, *self.watch], overlay, self.records)
        self._disk = Disk(self.packages, overlay, self.records, self._finder)
        self._uses = Uses()
        self.gone = Gone(self.records, self._uses)
        self.bystanders = Bystanders(self.records.modules, self._uses, self._definitions)
        self._parsed: dict[str, Definitions] = {}
        self.built_from = BuiltFrom()
        self._padding: dict[CodeType, CodeType] = {}
        self._open: Transaction | None = None
        self._told_gone: frozenset[str] = frozenset()
        """The modules whose file was gone at the last commit, which said so."""

    def install(self) -> None:
        """Put the loader hook in place; modules that are loaded already are taken to run what the disk holds.

        Raises:
            ReloadError: the file of one of these cannot be read or compiled.
        """
        if self._finder in sys.meta_path:
            return
        for name, module in list(sys.modules.items()):
            if within(name, [*self.packages, *self.watch]):
                self._finder.adopt(name, module)
        sys.meta_path.insert(0, self._finder)
        self._disk.note_files()
        self._disk.note_beside(self.beside, [*self.packages, *self.watch])

    def prepare(self) -> None:
        """Study the sources of the reloadable modules, so that no reload need do it: some milliseconds for each."""
        for name, record in self.records.modules.items():
            if within(name, self.packages):
                self._uses.study(name, record)
                for statement in self._definitions(name).statements:
                    uses_in(statement, name)

    def keep(self, modules: Mapping[str, Origin]) -> None:
        """Let modules of the packages run these sources when they are imported for the first time, whatever the disk
        holds: what another process ran, whose place this one takes. What the disk holds then is a change."""
        self._finder.kept = dict(modules)

    def uninstall(self) -> None:
        """Take the loader hook away."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)

    def add_participant(self, participant: Participant) -> None:
        """Let `participant` take part in later reloads; adding it twice changes nothing."""
        if not any(known is participant for known in self.participants):
            self.participants.append(participant)

    def changed(self) -> list[Change]:
        """The modules whose source differs, by content, from what last ran."""
        return self._disk.changes()

    def looked_at(self) -> list[str]:
        """The directories and files in which `changed` looks for reloadable modules."""
        return self._disk.roots()

    def strays(self) -> list[str]:
        """The Python files of the overlay that are no loaded module of the packages: an edit there does nothing."""
        return self._disk.strays()

    def read(self, modules: Iterable[str] | None = None) -> Sources:
        """Read all that a reload needs from the disk.

        Args:
            modules: exactly these modules, changed or not; None for all reloadable ones that changed.

        Raises:
            UnknownModules: a name that is not loaded or not recorded.
            ReloadError: a file that cannot be read.
        """
        changes = self.changed()
        edited = [c.module for c in changes if c.kind == "edited" and c.reloadable]
        loaded = [c.module for c in changes if c.kind == "deleted" and c.reloadable]
        names = edited if modules is None else list(dict.fromkeys(modules))
        self._check(names)
        return Sources(
            modules={name: self._disk.read(name) for name in names},
            unloaded=self._disk.unloaded(),
            named=modules is not None,
            pending=[name for name in edited if name not in names],
            outside=[c.module for c in changes if c.kind == "edited" and not c.reloadable and c.module not in names],
            deleted=[
                c.module for c in changes if c.kind == "deleted" and c.module in self.records.modules.keys() - names
            ],
            unused=self.gone.unused([name for name in loaded if name not in names]),
            new=[c.module for c in changes if c.kind == "new"],
        )

    def plan(self, modules: Iterable[str] | None = None, sources: Sources | None = None) -> Plan:
        """Tell what a reload would do; nothing is executed or changed.

        Raises:
            UnknownModules: a name that is not loaded or not recorded.
            ReloadError: a file that cannot be read or has a syntax error.
        """
        sources = sources if sources is not None else self.read(modules)
        analysis = self._analyse(sources, _to_nobody)
        why, inputs = analysis.why, analysis.inputs
        plan = Plan(
            modules=[ReloadedModule(name, why[name]) for name in inputs.modules],
            pending=list(sources.pending),
            needs_restart=self._outside(sources),
            notes=[*sources.notes(), *map(TO_FORGET.format, sources.unused)],
        )
        merge = Merge(UndoLog(), self.adapters, inputs, self._padding, self.records.modules, sources.deleted)
        old = {name: self.records.modules[name].code for name in inputs.modules}
        Planner(merge, old, analysis.codes, self.run_once(inputs)).fill(plan)
        return plan

    def run_once(self, inputs: Inputs) -> RunOnce:
        """Which functions run once, by the sources as they will be."""
        sources = {name: record.source for name, record in self.records.modules.items()}
        sources |= {name: module.new.source for name, module in inputs.modules.items()}

        def definitions(name: str) -> Definitions:
            return inputs.modules[name].new if name in inputs.modules else self._definitions(name)

        return RunOnce(self.runs_once, self.built_by, sources, definitions)

    def reload(
        self,
        modules: Iterable[str] | None = None,
        sources: Sources | None = None,
        settle: Callable[[], None] | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Transaction:
        """Execute changed modules and their users in place, as an open transaction.

        Args:
            modules: exactly these modules and their users; None for all reloadable ones that changed.
            sources: what `read` gave, here or in another process; the disk is then not read.
            settle: called once all of it runs the new code, before what is stale is looked for: for holders that
                choose anew among what the modules define. What it raises is raised, after all was undone.
            progress: called, in the thread of the reload, with what was just done: a module compared, run or merged,
                an import on the way, a pass over all objects. No part of a reload that ends is long without it but
                what the code of one module does itself.

        Raises:
            UnknownModules: a name that is not loaded or not recorded.
            ReloadError: a failure; everything was undone.
            StillRunning: a ReloadError; another thread stayed in code that was to be replaced.
            ReloadInProgress: an earlier transaction is still open.
        """
        if self._open is not None:
            raise ReloadInProgress
        started = time.perf_counter()
        sources = sources if sources is not None else self.read(modules)
        tell = progress if progress is not None else _to_nobody
        analysis = self._analyse(sources, tell)
        why, inputs = analysis.why, analysis.inputs
        codes = analysis.codes
        report = Report(
            modules=[ReloadedModule(name, why[name]) for name in inputs.modules],
            pending=list(sources.pending),
            needs_restart=self._outside(sources),
            notes=sources.notes(self._told_gone),
        )
        foreign = {name: self._foreign_names(name) for name in inputs.modules}
        report.seconds["plan"] = time.perf_counter() - started
        patch = Patch(self, self._finder, inputs, codes, sources, self._padding, report, settle, tell)
        log = patch.run()

        def close(committed: bool) -> None:
            self._open = None
            if committed:
                self._keep(sources, analysis, foreign, patch)

        self._open = Transaction(report, log, close)
        return self._open

    def reload_and_commit(self, modules: Iterable[str] | None = None, sources: Sources | None = None) -> Report:
        """Reload and keep the result; raises as `reload` does."""
        transaction = self.reload(modules, sources)
        transaction.commit()
        return transaction.report

    def transaction(self, modules: Iterable[str] | None = None, sources: Sources | None = None) -> Transaction:
        """`reload` for a `with` statement: committed at its end, undone when its block raises."""
        return self.reload(modules, sources)

    def _keep(self, sources: Sources, analysis: _Analysis, foreign: dict[str, set[str]], patch: Patch) -> None:
        """Take the new code for what runs; a failure leaves the records as they were."""
        before = [(records, dict(records.modules)) for records in self.everyone()]
        parsed = dict(self._parsed)
        try:
            for name, code in analysis.codes.items():
                for records in self._all_records(name):
                    kept = records.modules[name]
                    records.add(replace(kept, source=sources.modules[name], code=code, is_left=False))
                self._parsed[name] = analysis.inputs.modules[name].new
            for name in patch.left:
                for records in self._all_records(name):
                    records.modules[name] = replace(records.modules[name], is_left=True)
            for name, names in foreign.items():
                for records in self._all_records(name):
                    records.note_names(name, vars(sys.modules[name]), names)
            self._disk.note_files()
            self.built_from.keep(patch.built_from)
            self._told_gone = frozenset(sources.deleted)
            for name in sources.unused:
                self._parsed.pop(name, None)
                self._uses.forget(name)
        except BaseException:
            for records, modules in before:
                records.modules.clear()
                records.modules.update(modules)
            self._parsed = parsed
            raise

    def everyone(self) -> list[Records]:
        """The records of every reloader of this process."""
        return [self.records, *self._finder.others()]

    def _all_records(self, name: str) -> list[Records]:
        """The records of every reloader of this process that knows module `name`."""
        return [records for records in self.everyone() if name in records.modules]

    def _check(self, names: Iterable[str]) -> None:
        reasons = {name: self._why_unknown(name) for name in names if self.records.live(name) is None}
        if reasons:
            raise UnknownModules(reasons)

    def _why_unknown(self, name: str) -> str:
        if name not in sys.modules:
            return "it is not loaded"
        if not isinstance(sys.modules[name], ModuleType):
            return "another object took its place in sys.modules"
        if not within(name, [*self.packages, *self.watch]):
            return "it lies outside of them"
        return "it has no Python source"

    def _outside(self, sources: Sources) -> list[NeedsRestart]:
        return [NeedsRestart(name, self._why_outside(name)) for name in sources.outside]

    def _why_outside(self, name: str) -> str:
        if name not in self.records.modules:
            return "it does not run here, or ran before anything was recorded; it was left as it runs"
        if self.records.live(name) is None:
            return "another object took its place in sys.modules, which was left as it is"
        return "it lies outside of the reloadable packages and was left as it runs; name it to force it"

    def _foreign_names(self, name: str) -> set[str]:
        """The names that something outside of module `name` put into it."""
        known = self.records.modules[name].names
        return vars(sys.modules[name]).keys() - known if known is not None else set()

    def _unseen(self, name: str, old: Definitions) -> set[str]:
        """The names of a module that its statements bound without showing it in the syntax."""
        if not any(s.reads.is_dynamic for s in old.statements):
            return set()
        members = vars(sys.modules[name])
        names = members.keys() - old.binds - self._foreign_names(name)
        return {n for n in names if not n.startswith("__") and sys.modules.get(f"{name}.{n}") is not members[n]}

    def _late(self, name: str, old: Definitions) -> set[str]:
        """The names that a module with a `__getattr__` has put into its namespace since it ran."""
        if "__getattr__" not in old.binds or not any(s.reads.sets_later for s in old.statements):
            return set()
        members = vars(sys.modules[name])
        names = self._foreign_names(name) - old.binds
        return {n for n in names if not n.startswith("__") and sys.modules.get(f"{name}.{n}") is not members[n]}

    def _definitions(self, name: str) -> Definitions:
        """The statements that module `name` last ran."""
        record = self.records.modules[name]
        source = SourceText(record.source.path, b"") if record.is_left else record.source
        known = self._parsed.get(name)
        if known is None or known.source is not source:
            known = self._parsed[name] = _parse(name, source, known)
        return known

    def _analyse(self, sources: Sources, tell: Callable[[str], None]) -> _Analysis:
        self._check(sources.modules)
        codes: dict[str, CodeType] = {}
        parsed: dict[str, Definitions] = {}
        for name, source in sources.modules.items():
            codes[name] = _checked(name, source, compile_source)
            parsed[name] = _parse(name, source, self._definitions(name))
            tell(f"the comparison of {name}")
        why = dict.fromkeys(sources.modules, "named" if sources.named else "edited")
        over = self.gone.without_users([n for n in sources.deleted if n in sys.modules], sources.modules)
        candidates = {
            name: record
            for name, record in self.records.modules.items()
            if self.records.live(name) is not None and (within(name, self.packages) or name in why) and name not in over
        }
        for name in candidates.keys() - why.keys() if sources.new else ():
            found = tried_imports(name, self._definitions(name), sources.new)
            if found:
                why[name] = f"uses {min(found.values())}"
        users, doubtful = self._uses.users(why, candidates)
        why |= {name: f"uses {provider}" for name, provider in (users | doubtful).items()}
        modules: dict[str, ModuleInputs] = {}
        providers: dict[str, set[str]] = {}
        for name in why:
            old = self._definitions(name)
            new = parsed.get(name, old)
            namespace = vars(sys.modules[name])
            unseen = self._unseen(name, old)
            late = self._late(name, old)
            tried = set(tried_imports(name, new, sources.new))
            modules[name] = ModuleInputs(
                name, old, new, namespace, unseen, late=late, is_doubtful=name in doubtful, again=tried
            )
            edges = import_edges(name, new.source, [s.node for s in new.statements])
            providers[name] = providers_of(edges, sys.modules, at_import=True)
        for name in why:  # what a module imports comes first, whatever objects it left there in an earlier version
            if not providers[name] & why.keys():
                held = used_by_objects(name, modules[name].namespace)
                providers[name] |= {other for other in held if name not in providers.get(other, ())}
            record = replace(self.records.modules[name], source=modules[name].new.source)
            further = self._uses.may_use(name, record, why)
            providers[name] |= {other for other in further & why.keys() if name not in providers[other]}
        order = ordered(why, providers)
        inputs = Inputs({name: modules[name] for name in order}, self.records.modules)
        inputs.analyse()
        return _Analysis(why, inputs, codes)


@dataclass
class _Analysis:
    """Why each module takes part, in execution order, what of it has to run, and the code of the edited ones."""

    why: dict[str, str]
    inputs: Inputs
    codes: dict[str, CodeType]


def _to_nobody(what: str) -> None:
    """Takes the progress of a reload that nobody follows."""


def _parse(name: str, source: SourceText, previous: Definitions | None) -> Definitions:
    return _checked(name, source, lambda text: parse(text, previous))


def _checked(name: str, source: SourceText, work: Callable[[SourceText], Result]) -> Result:
    """Do what needs a source that can be compiled."""
    try:
        return work(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        message = f"{type(error).__name__}: {error.msg}" if isinstance(error, SyntaxError) else describe(error)
        line = _line(error, source.data)
        text = source.line(line)
        raise ReloadError("read", message, module=name, file=source.path, line=line, text=text) from error


def _line(error: Exception, data: bytes) -> int | None:
    """The line that cannot be compiled; errors of the encoding do not tell it themselves."""
    if isinstance(error, UnicodeDecodeError):
        return data.count(b"\n", 0, error.start) + 1
    if isinstance(error, SyntaxError) and error.lineno:
        return error.lineno
    if b"\0" in data:
        return data.count(b"\n", 0, data.index(b"\0")) + 1
    declared = [number for number, line in enumerate(data.splitlines()[:2], 1) if b"coding" in line]
    return declared[0] if declared else None
