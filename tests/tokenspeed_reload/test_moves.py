"""Definitions that move from one module to another and back: what is held goes with them."""

from __future__ import annotations

import sys

import pytest

SOURCE = """
def f(x): return x, {0!r}
class A:
    n = {0!r}
    def g(self): return {0!r}
def use(): return f(1), A().g()
"""
IMPORTS = "from there import f, A\ndef use(): return f(1), A().g()\n"


class Held:
    """What a program took from the module `here`."""

    def __init__(self, here):
        class Sub(here.A):
            pass

        self.here = here
        self.f, self.cls, self.one, self.bound, self.sub = here.f, here.A, here.A(), here.A().g, Sub

    def look(self):
        """The version that all of it shows."""
        here = self.here
        assert isinstance(self.one, here.A)
        assert issubclass(self.sub, here.A)
        assert self.cls is here.A
        calls = [self.f(1)[1], here.f(1)[1], self.one.g(), self.bound(), self.sub().g(), self.sub.n]
        (version,) = {*calls, here.use()[0][1], here.use()[1]}
        return version


@pytest.fixture
def held(project):
    project.write_module("here", SOURCE.format("1"))
    project.watch("here", "there")
    return Held(project.load("here"))


def edit(project, **texts):
    for name, text in texts.items():
        if text is None:
            (project.root / f"{name}.py").unlink()
        else:
            project.write_module(name, text)


STEPS = [
    ("there", {"here": IMPORTS, "there": SOURCE.format("there")}),
    ("edited there", {"there": SOURCE.format("edited there")}),
    ("back", {"here": SOURCE.format("back"), "there": None}),
    ("there again", {"here": IMPORTS, "there": SOURCE.format("there again")}),
    ("back again", {"here": SOURCE.format("back again"), "there": "x = 1"}),
    ("third time", {"here": IMPORTS, "there": SOURCE.format("third time")}),
]


def test_what_is_held_goes_with_a_definition_to_another_module_and_back(project, held):
    before = held.look()
    for version, texts in STEPS:
        edit(project, **texts)
        transaction = project.reloader.reload()
        assert held.look() == version
        assert transaction.report.stale == []
        transaction.swap()
        assert held.look() == before
        transaction.swap()
        assert held.look() == version
        transaction.commit()
        before = version


def test_an_undone_move_can_be_made_again(project, held):
    version, texts = STEPS[0]
    edit(project, **texts)
    for _ in range(3):
        project.reloader.reload().undo()
        assert held.look() == "1"
    project.reloader.reload_and_commit()
    assert held.look() == version


def test_a_file_that_comes_back_as_it_was_runs_again(project):
    own = "def use(x): return _turn(x)\ndef _turn(x): return x, {!r}\n"
    imported = "from there import turn as _turn\ndef use(x): return _turn(x)\n"
    there = "COUNT = []\ndef turn(x, gain=1): return x, gain\n"
    project.write_module("here", own.format(0))
    project.watch("here", "there")
    here = project.load("here")
    use, turn = here.use, here._turn
    for number in range(3):
        edit(project, here=imported, there=there)
        for end in ("undo", "commit"):
            transaction = project.reloader.reload()
            assert use(1) == turn(1) == (1, 1)
            assert sys.modules["there"].turn(1, 2) == (1, 2)
            getattr(transaction, end)()
        edit(project, here=own.format(number), there=None)
        project.reloader.reload_and_commit()
        assert use(1) == turn(1) == (1, number)


def test_a_function_that_came_back_is_the_one_that_went(project, held):
    edit(project, here=IMPORTS, there=SOURCE.format("there"))
    project.reloader.reload_and_commit()
    edit(project, here=SOURCE.format("back"))
    project.reloader.reload_and_commit()
    assert held.here.f is held.f
    assert held.f(1) == (1, "back")
    assert sys.modules["there"].f(1) == (1, "there")


def test_a_function_that_gives_way_to_one_that_was_there_takes_its_callers_along(project):
    project.write_module("there", SOURCE.format("there"))
    project.write_module("here", "import there\n" + SOURCE.format("here"))
    project.watch("here", "there")
    here = project.load("here")
    f, one = here.f, here.A()
    edit(project, here="import there\n" + IMPORTS)
    transaction = project.reloader.reload()
    assert f(1) == here.f(1) == (1, "there")
    # An object of the class that is gone does not become one of another class, and is named.
    assert one.g() == "here"
    assert "here.A" in [entry.definition for entry in transaction.report.stale]
    transaction.undo()
    assert (f(1), one.g(), here.A().g()) == ((1, "here"), "here", "here")


def test_what_a_program_binds_after_a_reload_outlives_its_undo(project, held):
    namespace = {"A": held.here.A, "count": 0}
    sys.modules["outside"] = outside = type(sys)("outside")
    try:
        vars(outside).update(namespace)
        edit(project, here=IMPORTS, there=SOURCE.format("there"))
        transaction = project.reloader.reload()
        assert outside.A is held.here.A
        outside.count += 1
        outside.more = "more"
        transaction.undo()
        assert (outside.A is held.here.A, outside.count, outside.more) == (True, 1, "more")
    finally:
        del sys.modules["outside"]
