"""Modules whose file is gone: they go with the last thing that needs them, and come back with an undo."""

from __future__ import annotations

import sys

import pytest

from tests.tokenspeed_reload.picture import deep_picture

OWN = "def use(x): return _turn(x)\ndef _turn(x): return x, 'own'\n"
IMPORTED = "from pk.there import turn as _turn\ndef use(x): return _turn(x)\n"
THERE = "def turn(x): return x, 'there'\n"
LEFT = "the file of pk.there is gone; the module was left as it runs"
FORGOTTEN = "nothing used pk.there any more, and its file is gone: it was forgotten"


@pytest.fixture
def here(project):
    """A module whose function has moved to another file and back, and that file is gone."""
    project.write(pk__init="", pk__here=OWN)
    project.watch("pk", watch=["beside"])
    here = project.load("pk.here")
    project.write(pk__here=IMPORTED, pk__there=THERE)
    project.reload()
    (project.root / "pk" / "there.py").unlink()
    project.write(pk__here=OWN)
    assert project.reload().notes == [LEFT]
    return here


def rename(project, number=0):
    project.write(pk__here=OWN.replace("_turn", f"_turned_{number}"))


def test_a_function_that_only_such_a_module_holds_is_not_stale(project, here):
    rename(project)
    transaction = project.reloader.reload()
    assert transaction.report.stale == []
    assert transaction.report.notes == [FORGOTTEN]
    transaction.commit()
    assert "pk.there" not in sys.modules
    assert "pk.there" not in project.reloader.records.modules
    assert not hasattr(sys.modules["pk"], "there")
    assert project.reloader.changed() == []


def test_an_undo_and_a_swap_bring_it_back(project, here):
    before = deep_picture({}, ["pk.here", "pk.there"])
    there = id(sys.modules["pk.there"])
    rename(project)
    transaction = project.reloader.reload()
    transaction.swap()
    assert id(sys.modules["pk.there"]) == there == id(sys.modules["pk"].there)
    transaction.swap()
    assert "pk.there" not in sys.modules
    transaction.undo()
    assert deep_picture({}, ["pk.here", "pk.there"]) == before
    assert id(sys.modules["pk.there"]) == there == id(sys.modules["pk"].there)
    assert [(c.module, c.kind) for c in project.reloader.changed()] == [
        ("pk.here", "edited"),
        ("pk.there", "deleted"),
    ]
    assert project.reload().notes == [FORGOTTEN]


def test_a_reload_that_fails_brings_it_back(project, here):
    rename(project)
    project.write(pk__here=OWN + "1 / 0\n")
    with pytest.raises(Exception, match="ZeroDivisionError"):
        project.reload()
    assert sys.modules["pk.there"].turn(1) == (1, "own")


def test_what_goes_in_the_same_edit_as_the_file_that_holds_it_is_not_stale(project):
    project.write(pk__init="", pk__here="def g(): return 1\n")
    project.write(pk__there="from pk.here import g\nCALLS = [g]\nclass A:\n    f = staticmethod(g)\n")
    project.write(pk__user="from pk.there import A\n")
    project.watch("pk")
    project.load("pk.user")
    (project.root / "pk" / "there.py").unlink()
    project.write(pk__here="def h(): return 1\n", pk__user="")
    report = project.reload()
    assert (report.stale, report.notes) == ([], [LEFT])


@pytest.mark.parametrize("hold", ["turn", "module"])
def test_what_something_else_holds_stays_and_is_told(project, here, hold):
    there = sys.modules["pk.there"]
    holder = type(sys)("holder")
    vars(holder).update(held=there.turn if hold == "turn" else there)
    sys.modules["holder"] = holder
    del there
    try:
        rename(project)
        report = project.reload()
        assert "pk.there" in sys.modules
        assert [(s.definition, s.held_by) for s in report.stale] == [("pk.here._turn", ["pk.there.turn"])]
        del sys.modules["holder"]
        del holder
        rename(project, 1)
        assert project.reload().notes == [FORGOTTEN]
    finally:
        sys.modules.pop("holder", None)


@pytest.mark.parametrize(
    "text",
    [
        "import pk.there\n",
        "def later():\n    from pk.there import turn\n    return turn\n",
        "NAMES = {'turn': 'pk.there:turn'}\n",
        "from pk import there\nHELD = [there.turn]\n",
    ],
)
def test_a_module_that_another_one_uses_stays(project, text):
    project.write(pk__init="", pk__there=THERE, pk__user=text, pk__here=OWN)
    project.watch("pk")
    for name in ("there", "user", "here"):
        project.load(f"pk.{name}")
    (project.root / "pk" / "there.py").unlink()
    for number in range(2):
        rename(project, number)
        project.reload()
        assert "pk.there" in sys.modules
    project.write(pk__user="")
    project.reload()
    rename(project, 2)
    assert project.reload().notes == [FORGOTTEN]
    assert "pk.there" not in sys.modules


def test_modules_that_only_use_each_other_go_together(project):
    project.write(pk__init="", pk__here=OWN, pk__user="import pk.a.one\n", pk__a__init="from pk.a import one, two\n")
    project.write(pk__a__one="from pk.a.two import B\nclass A: made = B()\n")
    project.write(pk__a__two="class B:\n    def get(self):\n        from pk.a.one import A\n        return A\n")
    project.watch("pk")
    for name in ("here", "user"):
        project.load(f"pk.{name}")
    for file in ("__init__", "one", "two"):
        (project.root / "pk" / "a" / f"{file}.py").unlink()
    rename(project)
    project.reload()
    project.write(pk__user="")
    project.reload()
    assert "pk.a.one" in sys.modules
    rename(project, 1)
    project.reload()
    assert [name for name in sys.modules if name.startswith("pk.a")] == []


def test_a_file_that_comes_back_runs_as_a_new_one_or_in_place(project, here):
    project.write(pk__here=IMPORTED, pk__there=THERE)
    project.reload()
    turn = here.use(1), id(sys.modules["pk.there"])
    (project.root / "pk" / "there.py").unlink()
    project.write(pk__here=OWN)
    project.reload()
    rename(project)
    project.reload()
    assert "pk.there" not in sys.modules
    project.write(pk__here=IMPORTED, pk__there=THERE.replace("'there'", "'again'"))
    project.reload()
    assert (turn[0], here.use(1)) == ((1, "there"), (1, "again"))
    assert sys.modules["pk"].there is sys.modules["pk.there"]


def test_an_import_of_what_was_forgotten_fails_as_in_a_new_process(project, here):
    rename(project)
    project.reload()
    project.write(pk__here=IMPORTED)
    with pytest.raises(Exception, match=r"pk\.there"):
        project.reload()
    assert here.use(1) == (1, "own")


def test_a_plan_tells_it(project, here):
    rename(project)
    plan = project.reloader.plan()
    assert plan.notes == ["nothing uses pk.there any more, and its file is gone: a reload forgets it"]
    assert "pk.there" in sys.modules
