"""Faults of every kind at every point of a reload: all that was touched is as before, and the next reload lands."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tokenspeed_reload.differential import load_cases
from tests.tokenspeed_reload.test_differential import edit, start
from tests.tokenspeed_reload.test_scenarios import CASES as SCENARIOS
from tests.tokenspeed_reload.test_scenarios import edit as edit_scenario
from tests.tokenspeed_reload.test_scenarios import start as start_scenario
from tokenspeed_reload import (
    IncompleteUndo,
    ReloadError,
    bindings,
    derived,
    effects,
    heap,
    merge,
    moduleupdate,
    newmodules,
    outside,
    patch,
    running,
    substitute,
)
from tokenspeed_reload.adapters import default_adapters
from tokenspeed_reload.undo import Record

KINDS = (RuntimeError, MemoryError, KeyboardInterrupt, SystemExit, RecursionError)
EVERY = bool(os.environ.get("RELOAD_FAULTS"))
"""Set to try each point of each case, which takes an hour."""


class Faults:
    """Lets a reload fail before or after a step of its work; the steps are counted over all points."""

    POINTS: tuple[tuple[Any, str], ...] = (
        (patch, "execute"),
        (patch, "bind"),
        (patch, "held_elsewhere"),
        (patch, "find_stale"),
        (patch.Patch, "_supersede"),
        (moduleupdate.ModuleUpdate, "show"),
        (moduleupdate.ModuleUpdate, "log_mutated"),
        (moduleupdate.ModuleUpdate, "drop_attributes"),
        (moduleupdate.ModuleUpdate, "note_removed"),
        (derived.Derived, "start"),
        (derived.Derived, "detach"),
        (heap, "update_functions"),
        (heap, "finish_libraries"),
        (effects.Footprint, "take"),
        (effects.Footprint, "drop_moved"),
        (effects.Footprint, "without_repeats"),
        (newmodules.NewModules, "start"),
        (outside.Outside, "effects"),
        (running, "wait_for_others"),
        (running, "suspended"),
        (substitute.Substitution, "in_holders"),
        (substitute.Substitution, "_replace"),
        (merge.Merge, "follow"),
        (merge.Merge, "touch"),
        (bindings, "_settle"),
        *((type(adapter), "merge") for adapter in default_adapters()),
        *((type(adapter), "begin") for adapter in default_adapters() if hasattr(adapter, "begin")),
        *((type(adapter), "finish") for adapter in default_adapters() if hasattr(adapter, "finish")),
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step = 0
        self.fails_at = 0
        self.kind: type[BaseException] = RuntimeError
        for owner, name in self.POINTS:
            if name in vars(owner):
                monkeypatch.setattr(owner, name, self._wrapped(vars(owner)[name]))

    def at(self, step: int) -> None:
        """Fail at this step of the next reload, and never for 0."""
        self.step, self.fails_at, self.kind = 0, step, KINDS[step % len(KINDS)]

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **options: Any) -> Any:
            self._tick()
            result = function(*args, **options)
            self._tick()
            return result

        return wrapper

    def _tick(self) -> None:
        self.step += 1
        if self.step == self.fails_at:
            raise self.kind("a fault")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def fail_everywhere(project, faults: Faults, index: int, look: Callable[[], Any]) -> None:
    """Fail at each step, or at a few that differ from case to case; then a reload without a fault has to go."""
    before = look()
    faults.at(0)
    with contextlib.suppress(ReloadError):
        project.reloader.reload().undo()
    assert look() == before
    total = faults.step
    few = {1 + (index * 7 + at * max(1, total // 2)) % total for at in range(2)} if total else set()
    for step in range(1, total + 1) if EVERY else sorted(few):
        faults.at(step)
        try:
            project.reloader.reload().undo()
        except ReloadError as error:
            assert error.not_undone == []
        except KeyboardInterrupt as error:
            assert not hasattr(error, "__notes__")
        assert look() == before, f"step {step} of {total}, {faults.kind.__name__}"
    faults.at(0)
    with contextlib.suppress(ReloadError):
        transaction = project.reloader.reload()
        after = look()
        for _ in range(50 if EVERY or index % 16 == 0 else 1):
            transaction.swap()
            assert look() == before
            transaction.swap()
            assert look() == after
        transaction.undo()
    assert look() == before


CASES = load_cases(Path(__file__).parent / "cases")
PART = 1 if EVERY else 3


@pytest.mark.parametrize("index", range(0, len(CASES), PART), ids=[case.name for case in CASES[::PART]])
def test_a_fault_anywhere_leaves_no_trace(project, picture, faults, index):
    case = CASES[index]
    held = start(project, case)
    edit(project, case)
    fail_everywhere(project, faults, index, lambda: picture(held, case.first))


@pytest.mark.parametrize("index", range(0, len(SCENARIOS), PART), ids=[case["id"] for case in SCENARIOS[::PART]])
def test_a_fault_in_a_scenario_leaves_no_trace(project, picture, faults, keep_stamp, index):
    case = SCENARIOS[index]
    held = start_scenario(project, case)
    edit_scenario(project, case, keep_stamp)
    fail_everywhere(project, faults, index, lambda: picture(held, list(case["before"])))


BEFORE = "X = 1\ndef f(): return X\nclass A:\n    def m(self): return X\nT = {'f': f}\n"
AFTER = "X = 2\ndef f(): return X + 1\nclass A:\n    def m(self): return X + 1\n    def n(self): return 1\n"
AFTER += "T = {'f': f, 1: 2}\n"


def begin(project, **options: Any) -> Any:
    project.write(m=BEFORE, u="from m import X, f\nY = X")
    project.watch("m", "u", **options)
    project.load("u")
    project.write(m=AFTER)
    return project.load("m")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["m", "u"])
def test_a_fault_in_edited_code(project, picture, kind, where):
    m = begin(project)
    before = picture({}, ["m", "u"])
    code = {"m": AFTER, "u": "from m import X, f\nY = X\n"}[where]
    project.write_module(where, code + f"raise {kind.__name__}('stop')\n")
    with pytest.raises(KeyboardInterrupt if kind is KeyboardInterrupt else ReloadError):
        project.reloader.reload()
    assert picture({}, ["m", "u"]) == before
    project.write_module(where, code)
    project.reload()
    assert (m.f(), m.A().n()) == (3, 1)


class Keeper:
    """A participant of which one method fails, at one of its calls."""

    def __init__(self, name: str, at: int = 1) -> None:
        self.name, self.left = name, at

    def _step(self, name: str) -> None:
        if name == self.name:
            self.left -= 1
            if self.left == 0:
                raise RuntimeError(f"{name} fails")

    def snapshot(self) -> Any:
        self._step("snapshot")

    def restore(self, state: Any) -> None:
        self._step("restore")

    def withdraw(self, module: str, definitions: Any) -> None:
        self._step("withdraw")


@pytest.mark.parametrize(("method", "at"), [("withdraw", 1), ("withdraw", 2), ("snapshot", 1)])
def test_a_participant_that_fails_is_a_failed_reload(project, picture, method, at):
    m = begin(project, participants=[Keeper(""), Keeper(method, at)])
    before = picture({}, ["m", "u"])
    with pytest.raises(ReloadError, match=f"{method} fails"):
        project.reloader.reload()
    assert picture({}, ["m", "u"]) == before
    project.reload()
    assert m.f() == 3


def test_a_participant_that_cannot_be_restored_keeps_nothing_else_from_it(project, picture):
    begin(project, participants=[Keeper("restore"), Keeper("")])
    before = picture({}, ["m", "u"])
    transaction = project.reloader.reload()
    with pytest.raises(IncompleteUndo, match=r"restart the program: .*restore fails"):
        transaction.undo()
    assert not transaction.is_open
    assert picture({}, ["m", "u"]) == before
    project.reload()


class Bomb(Record):
    """A record that cannot be exchanged."""

    def exchange(self) -> None:
        raise MemoryError("bomb")


class BombAdapter:
    """Puts bombs into the log, and fails where it is told to."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def matches(self, live: Any, new: Any, merge: Any) -> bool:
        return getattr(live, "__name__", "") == "f"

    def merge(self, live: Any, new: Any, where: str, merge: Any) -> Any:
        merge.log.add(Bomb())
        if self.fails:
            raise ValueError("merge fails")
        return default_adapters()[2].merge(live, new, where, merge)

    def begin(self, merge: Any) -> None:
        merge.log.add(Bomb())

    def wraps(self, value: Any) -> bool:
        return False

    def kinds(self) -> set[type]:
        return set()

    def finish(self, objects: list[Any], merge: Any) -> None:
        merge.log.add(Bomb())


def test_a_record_that_cannot_be_undone_keeps_no_other_from_it(project, picture):
    begin(project, adapters=[BombAdapter(fails=True)])
    before = picture({}, ["m", "u"])
    with pytest.raises(ReloadError, match=r"merge fails.*restart the program.*MemoryError: bomb") as caught:
        project.reloader.reload()
    assert caught.value.not_undone == ["MemoryError: bomb"] * 2
    assert picture({}, ["m", "u"]) == before
    project.reloader.adapters[0].fails = False
    transaction = project.reloader.reload()
    after = picture({}, ["m", "u"])
    for expected in (before, after, before):
        with pytest.raises(IncompleteUndo):
            transaction.swap()
        assert picture({}, ["m", "u"]) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", ["note_files", "note_names", "add", "keep"])
def test_a_fault_in_the_work_of_a_commit_undoes_the_reload(project, picture, monkeypatch, name, kind, swapped):
    m = begin(project)
    reloader = project.reloader
    before, sources = picture({}, ["m", "u"]), {n: r.source for n, r in reloader.records.modules.items()}
    transaction = reloader.reload()
    if swapped:
        transaction.swap()
    owners = {"note_files": reloader._disk, "keep": reloader.built_from}

    def fail(*args: Any) -> None:
        raise kind("a fault")

    with monkeypatch.context() as patched:
        patched.setattr(owners.get(name, reloader.records), name, fail)
        with pytest.raises(ReloadError if issubclass(kind, Exception) else kind):
            transaction.commit()
    assert not transaction.is_open
    assert picture({}, ["m", "u"]) == before
    assert {n: r.source for n, r in reloader.records.modules.items()} == sources
    assert [c.module for c in reloader.changed()] == ["m"]
    project.reload()
    assert m.f() == 3


@pytest.fixture
def interruptible():
    """A shell starts what runs in its background with SIGINT ignored."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_waits_for_the_end_of_an_undo(project, picture):
    class Interrupting(Keeper):
        def restore(self, state: Any) -> None:
            signal.raise_signal(signal.SIGINT)

    begin(project, participants=[Interrupting("")])
    before = picture({}, ["m", "u"])
    transaction = project.reloader.reload()
    with pytest.raises(KeyboardInterrupt):
        transaction.undo()
    assert not transaction.is_open
    assert picture({}, ["m", "u"]) == before
