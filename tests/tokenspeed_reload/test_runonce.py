"""Edits whose effect is only in what was built before: they are named, and nothing else is."""

from __future__ import annotations

import pytest

LAYER = """
FACTOR = 1
SHAPES = (1, 2)
class Layer:
    def __init__(self): self.table = None
    def plan(self): self.table = self.rows() + _helper(FACTOR)
    def rows(self): return 1
    def again(self): return 1
    def kept(self): return 1
    def forward(self): return (self.again(), _both(), self.table)
    def reset(self): self.plan(); self.act = self.kept
def _helper(x): return _deeper(x) + _both()
def _deeper(x): return len(SHAPES)
def _both(): return 1
def _unused(): return 1
class Step:
    def __init__(self, n=1): self.n = n
class Part:
    def __init__(self, n=1): self.n = n
def build(): return Layer(), Part()
def step(): return Step()
"""


def needs_restart(project, before: str, after: str, **options: object) -> list[str]:
    project.write_module("m", before)
    project.watch("m", **{"runs_once": ["__init__", "plan*", "build"], **options})
    project.load("m")
    project.write_module("m", after)
    return [item.what for item in project.reload().needs_restart]


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("self.rows() +", "self.rows() -", ["m.Layer.plan"]),
        ("def rows(self): return 1", "def rows(self): return 2", ["m.Layer.rows"]),
        ("return _deeper(x) +", "return _deeper(x) -", ["m._helper"]),
        ("return len(SHAPES)", "return len(SHAPES) + 1", ["m._deeper"]),
        ("FACTOR = 1", "FACTOR = 2", ["m.FACTOR"]),
        ("(1, 2)", "(1, 2, 3)", ["m.SHAPES"]),
        ("def again(self): return 1", "def again(self): return 2", []),
        ("def kept(self): return 1", "def kept(self): return 2", []),
        ("def _both(): return 1", "def _both(): return 2", []),
        ("def _unused(): return 1", "def _unused(): return 2", []),
        ("self.table = None", "self.table = 0", ["m.Layer.__init__"]),
        ("class Part:\n    def __init__(self, n=1)", "class Part:\n    def __init__(self, n=2)", ["m.Part.__init__"]),
        ("class Part:\n", "class Part:\n    def plan(self): pass\n", ["m.Part.plan"]),
        ("    def plan(self): self.table = self.rows() + _helper(FACTOR)\n", "", ["m.Layer.plan"]),
        ("    def __init__(self): self.table = None\n", "", ["m.Layer.__init__"]),
        ("class Step:\n    def __init__(self, n=1)", "class Step:\n    def __init__(self, n=2)", []),
    ],
)
def test_what_only_run_once_code_uses_is_named(project, old, new, named):
    assert old in LAYER
    assert needs_restart(project, LAYER, LAYER.replace(old, new)) == named


def test_code_of_a_start_up_module_runs_once(project):
    project.write_module("start", "import m\ndef run(): return m.make() + m.both()")
    project.watch("m", watch=["start"], built_by=["start"])
    project.write_module("m", "def make(): return 1\ndef both(): return 1\ndef forward(): return both()")
    project.load("start")
    project.write_module("m", "def make(): return 2\ndef both(): return 2\ndef forward(): return both()")
    assert [item.what for item in project.reload().needs_restart] == ["m.make"]


def test_a_function_made_by_run_once_code_may_run_again(project):
    text = "def plan():\n    def inner(): return helper()\n    return inner\ndef helper(): return 1"
    assert needs_restart(project, text, text.replace("return 1", "return 2")) == []


def test_a_value_built_anew_from_an_edited_class_is_not_named(project):
    text = "class A:\n    def f(self): return 1\nTABLE = tuple([A])\ndef build(): return TABLE[0]()"
    assert needs_restart(project, text, text.replace("return 1", "return 2")) == []


def test_a_method_that_a_base_of_another_package_may_call_runs_again(project):
    text = "from string import Formatter\nclass F(Formatter):\n    def get_value(self, *a): return 1\n"
    text += "    def plan(self): return self.get_value()"
    assert needs_restart(project, text, text.replace("return 1", "return 2")) == []


@pytest.mark.parametrize("is_computed", [True, False])
def test_a_cached_property_is_named_where_an_object_holds_its_value(project, is_computed):
    text = "import functools\nclass A:\n    @functools.cached_property\n    def x(self): return 1\n"
    text += "class B(A): pass\nHELD = [B()]\n"
    text += "HELD[0].x\n" if is_computed else ""
    assert needs_restart(project, text, text.replace("return 1", "return 2")) == (["m.A.x"] if is_computed else [])


@pytest.mark.parametrize("alias", ["kind = Part", "kind: type = Part"])
@pytest.mark.parametrize(("user", "named"), [("__init__", ["m.Part.__init__"]), ("forward", [])])
def test_an_alias_in_a_class_is_used_where_its_name_is(project, alias, user, named):
    text = "class Part:\n    def __init__(self): self.n = 1\n"
    text += f"class Model:\n    {alias}\n    def {user}(self): self.kind()\ndef build(): return Model()"
    assert needs_restart(project, text, text.replace("self.n = 1", "self.n = 2")) == named


BACK = [
    ("self.table = None", "self.table = 0", "m.Layer.__init__"),
    (
        "def __init__(self, n=1): self.n = n\ndef build",
        "def __init__(self, n=2): self.n = n\ndef build",
        "m.Part.__init__",
    ),
    ("FACTOR = 1", "FACTOR = 2", "m.FACTOR"),
    ("SHAPES = (1, 2)", "SHAPES = (1, 2, 3)", "m.SHAPES"),
    ("TABLE = [1, {2: 3}]", "TABLE = [1, {2: 4}]", "m.TABLE"),
    ("return len(SHAPES)", "return len(SHAPES) + 1", "m._deeper"),
    ("self.rows() +", "self.rows() -", "m.Layer.plan"),
    ("    def __init__(self): self.table = None\n", "", "m.Layer.__init__"),
    ("class Part:\n", "class Part:\n    def plan(self): pass\n", "m.Part.plan"),
    ("limit=LIMIT", "limit=3", "m.Layer.plan_more"),
    ("LIMIT = 1", "LIMIT = 2", "m.Layer.plan_more"),
]


@pytest.mark.parametrize(("old", "new", "named"), BACK)
def test_an_edit_that_is_taken_back_is_not_named(project, old, new, named):
    text = LAYER.replace("class Layer:\n", "class Layer:\n    def plan_more(self, limit=LIMIT): return limit, TABLE\n")
    text = "TABLE = [1, {2: 3}]\nLIMIT = 1\n" + text
    assert old in text
    project.write_module("m", text)
    reloader = project.watch("m", runs_once=["__init__", "plan*", "build"])
    project.load("m")

    def told() -> list[str]:
        reloader.plan()
        return [item.what for item in project.reload().needs_restart]

    for _ in range(2):
        project.write_module("m", text.replace(old, new))
        reloader.reload().undo()
        assert named in told()
        project.write_module("m", text.replace(old, new) + "# the end\nOTHER = 1\n")
        assert told() == []
        project.write_module("m", text)
        assert told() == []
    project.write_module("m", text.replace(old, new))
    assert named in told()
