"""What a plan tells before anything is touched."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from tests.tokenspeed_reload.differential import load_cases
from tests.tokenspeed_reload.test_differential import HELPERS, start
from tokenspeed_reload import Plan, ReloadError, Report

BEFORE = """
LIMIT = 1
OBJECT = object()
def stays(): return 1
def edited(): return LIMIT
def gone(): return 1
def mk(n):
    def inner(): return n
    return inner
class A:
    __slots__ = ("x",)
    def __init__(self): self.x = 1
    def m(self): return 1
class P:
    def m(self): return 1
def gen():
    yield 1
    yield 2
"""
AFTER = """
LIMIT = 2
OBJECT = object(*())
def stays(): return 1
def edited(): return LIMIT + 1
def mk(n):
    k = 1
    def inner(): return n + k
    return inner
class A:
    __slots__ = ("x", "y")
    def __init__(self): self.x = 2
    def m(self): return super().__repr__()
class P(dict):
    def m(self): return 1
def gen():
    yield 1
    yield 3
"""


def test_a_plan_names_everything(project, picture):
    project.write_module("m", BEFORE)
    project.write_module("u", "from m import LIMIT\nY = LIMIT")
    project.watch("m", "u")
    m = project.load("m")
    project.load("u")
    held = [m.gone, m.mk(1), m.OBJECT]
    running = m.gen()
    next(running)
    before = picture({"held": held}, ["m", "u"])
    project.write_module("m", AFTER)
    plan = project.reloader.plan()
    assert picture({"held": held}, ["m", "u"]) == before
    assert [(module.name, module.why) for module in plan.modules] == [("m", "edited"), ("u", "uses m")]
    assert (plan.statements["u"], plan.removed["m"]) == (["LIMIT", "Y"], ["gone"])
    assert plan.patched == ["m.A", "m.A.__init__", "m.P", "m.edited", "m.gen", "m.mk"]
    assert plan.redirected == ["m.A.m"]
    stale = {s.definition: s.why for s in plan.stale}
    assert stale.keys() == {"m.gone", "m.mk.<locals>.inner", "m.OBJECT"}
    assert {n.what for n in plan.needs_restart} == {"m.A", "m.A.__init__", "m.P"}
    assert [(r.what, r.where) for r in plan.running] == [("m.gen", "generator")]


def test_a_plan_without_an_edit_is_empty(project):
    project.write_module("m", BEFORE)
    project.watch("m")
    project.load("m")
    plan = project.reloader.plan()
    assert (plan.modules, plan.patched, plan.stale, plan.needs_restart) == ([], [], [], [])


def test_a_broken_edit_cannot_be_planned(project):
    project.write_module("m", BEFORE)
    project.watch("m")
    project.load("m")
    project.write_module("m", "def (")
    with pytest.raises(ReloadError):
        project.reloader.plan()


CASES = load_cases(Path(__file__).parent / "cases")

DECORATORS = "what a decorator makes of a definition decides"
CALLS = "what a call gives decides: of a class or function, or of a value that is made out of one"
MOVES = "what an import gives decides"
CONDITIONS = "which branch runs decides"
NOT_FORESEEN = dict.fromkeys(
    (
        "a decorator that becomes a class",
        "a class decorator that becomes a function",
        "decorators that fill a registry",
        "the dataclass decorator goes, comes",
        "dataclasses: fields, order, frozen, slots, kw_only",
        "slots dataclass gains a field",
        "singledispatch",
        "a cached function of another size is held",
        "a wrapper gives way to the plain function",
        "a wrapper that is bound to a class attribute from outside",
    ),
    DECORATORS,
)
NOT_FORESEEN |= dict.fromkeys(
    (
        "__init_subclass__ of another module",
        "class keyword arguments and __init_subclass__ defaults",
        "the metaclass is in another module",
        "lambdas in tables and defaults",
        "keyword default objects of edited classes",
        "a slots subclass in another module and outside, containers of the class",
        "type() and make_dataclass at run time",
        "type() and dynamic classes",
        "mixins and class factories over modules",
        "namedtuple subclass and instances",
        "methods assigned in loops",
        "a class is registered with an abstract base, and one is no longer",
        "class getitem, match args, methodcaller, name tables",
        "type parameters with bounds and generics over them (3.12)",
        "tables that are built anew and hold what they held",
    ),
    CALLS,
)
NOT_FORESEEN |= dict.fromkeys(
    (
        "try and except around imports and definitions",
        "a conditional override after the definition",
    ),
    CONDITIONS,
)
NOT_FORESEEN |= dict.fromkeys(
    ("a class that moves to a new file is held outside",),
    MOVES,
)
"""Cases of which a plan cannot know all, since nothing has run yet, and why."""


def told(plan_or_report: Plan | Report) -> dict[str, set[str]]:
    """What it says becomes of definitions, apart from what calls at run time made."""
    names = {
        "patched": plan_or_report.patched,
        "redirected": plan_or_report.redirected,
        "stale": [s.definition for s in plan_or_report.stale],
        "needs_restart": [n.what for n in plan_or_report.needs_restart],
    }
    return {field: {name for name in found if "<" not in name} for field, found in names.items()}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_what_a_plan_tells_is_what_a_reload_does(project, case, picture):
    held = start(project, case)
    before = picture(held, case.first)
    modules, paths = set(sys.modules), list(sys.path)
    for name, text in case.after.items():
        project.write_module(name, text)
    for name in case.gone:
        project.root.joinpath(*name.split(".")).with_suffix(".py").unlink()
    plan = project.reloader.plan()
    assert picture(held, case.first) == before
    assert (set(sys.modules), sys.path) == (modules, paths)
    with contextlib.suppress(ReloadError):
        report = project.reload()
        assert plan.modules == report.modules
        if case.name not in NOT_FORESEEN:
            assert told(plan) == told(report)
    assert HELPERS.keys() <= held.keys()


def test_a_transaction_is_committed_or_undone_by_its_block(project):
    project.write_module("m", "X = 1")
    reloader = project.watch("m")
    m = project.load("m")
    project.write_module("m", "X = 2")
    with pytest.raises(KeyError), reloader.transaction():
        assert m.X == 2
        raise KeyError
    assert m.X == 1
    with reloader.transaction() as transaction:
        transaction.swap()
        assert m.X == 1
    assert m.X == 2
    project.write_module("m", "X = 3")
    sources = reloader.read()
    project.write_module("m", "X = 4")
    assert reloader.reload_and_commit(sources=sources).objects_patched == 1
    assert m.X == 3


def test_what_calls_made_is_told(project):
    source = """
        def make(k):
            class Local:
                size = {size}
                def get(self): return k
            def scale(x={size}): return x * k
            {extra}
            return Local, scale
        """
    project.write_module("m", source.format(size=1, extra="def gone(): return k\n            make.gone = gone"))
    reloader = project.watch("m")
    m = project.load("m")
    held = m.make(3)
    holder = {"gone": m.make.gone}
    project.write_module("m", source.format(size=2, extra=""))
    plan = reloader.plan()
    assert {"m.make.<locals>.Local", "m.make.<locals>.scale"} <= set(plan.patched)
    assert "m.make.<locals>.gone" in {s.definition for s in plan.stale}
    assert (held[0].size, held[1]()) == (1, 3)
    report = project.reload()
    assert (held[0].size, held[1]()) == (2, 6)
    assert "m.make.<locals>.gone" in {s.definition for s in report.stale}
    assert holder["gone"]() == 3
