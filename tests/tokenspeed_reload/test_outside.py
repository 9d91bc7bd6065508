"""What a module does to the rest of the process when it runs again is told, since an undo does not cover it."""

from __future__ import annotations

import atexit
import json
import sys
import threading

import pytest


def effects(project, before: str, after: str) -> list[str]:
    project.write_module("m", before)
    project.watch("m")
    project.load("m")
    project.write_module("m", after)
    transaction = project.reloader.reload()
    found = [effect.what for effect in transaction.report.effects]
    assert all(effect.module == "m" for effect in transaction.report.effects)
    transaction.undo()
    return found


OTHER = """
class C:
    size = 1
    def __init__(self): self.held = {}
    def f(self): return 1
T, L, S, c = {}, [1], {1}, C()
def g(): return 1
"""


@pytest.fixture
def other(project):
    """A module that is not recorded."""
    project.write_module("other", OTHER)
    yield
    sys.modules.pop("other", None)


def test_a_thread_that_was_started(project):
    stop = "import threading\nstop = threading.Event()\n"
    text = stop + "t = threading.Thread(target=stop.wait, name='loop', daemon=True)\nt.start()\n"
    found = effects(project, stop, text)
    (thread,) = [t for t in threading.enumerate() if t.name == "loop"]
    try:
        assert "it started loop, which goes on" in found
    finally:
        thread._target.__self__.set() if hasattr(thread, "_target") else None
        thread.join()


def test_a_function_for_the_exit(project):
    found = effects(project, "import atexit", "import atexit\n@atexit.register\ndef f(): pass")
    atexit.unregister(sys.modules["m"].__dict__.get("f"))
    assert found == ["it registered 1 function(s) with atexit"]


def test_an_attribute_of_a_foreign_module(project):
    try:
        assert effects(project, "import json", "import json\njson.our_mark = 1") == ["it set json.our_mark"]
    finally:
        del json.our_mark


def test_a_statement_that_calls_something_foreign(project, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert effects(project, "import sys", "import sys\nsys.path.append('x')") == [
        "line 2 ran for its effect outside of the recorded modules: sys.path.append('x')"
    ]


@pytest.mark.parametrize("is_loaded", [False, True], ids=["loaded by the edit", "loaded before"])
@pytest.mark.parametrize(
    ("statement", "where"),
    [
        ("other.T['a'] = 1", "other.T"),
        ("other.T |= {'a': 1}", "other.T"),
        ("other.L.append(1)", "other.L"),
        ("other.S.discard(1)", "other.S"),
        ("other.c.x = 1", "other.c"),
        ("other.c.held['k'] = 1", "other.c"),
        ("other.C.f = lambda self: 2", "other.C.f"),
        ("other.C.size += 1", "other.C.size"),
        ("other.g.mark = 1", "other.g.mark"),
        ("del other.T", "other.T"),
        ("setattr(other.C, 'new', 1)", "other.C"),
        ("if True:\n    other.L.append(1)", "other.L"),
        ("for n in 'ab': other.T[n] = n", "other.T"),
        ("with open('/dev/null'): other.L.clear()", "other.L"),
    ],
)
def test_a_write_to_an_object_of_another_module(project, other, statement, where, is_loaded):
    if is_loaded:
        project.load("other")
    found = effects(project, "", f"import other\n{statement}")
    assert len(found) == 1 and where in found[0], found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("from other import L\nL.append(1)", "L.append(1)"),
        ("from other import T as t\nt['a'] = 1", "other.T"),
        ("import other as o\ndef f(): o.L.append(1)\nf()", "it wrote to other.L"),
        ("import other\ndef mark(f):\n    other.T[f.__name__] = f\n    return f\n@mark\ndef f(): pass", "other.T"),
        ("import os\nos.environ['RELOAD_TEST'] = '1'", "it wrote to os.environ"),
    ],
)
def test_a_write_through_another_name_or_a_call(project, other, monkeypatch, text, told):
    monkeypatch.setenv("RELOAD_TEST", "0")
    project.load("other")
    (found,) = effects(project, "", text)
    assert told in found


@pytest.mark.parametrize(
    "after",
    [
        "import json\nX = json.dumps([1])",
        "import json\nclass A(json.JSONDecoder):\n    def f(self): return super().decode('1')\nX = A().f()",
        "import os, re\nX = os.environ.get('HOME'), re.compile('x')",
        "import logging\nlog = logging.getLogger(__name__)",
        "import enum\nclass E(enum.Flag):\n    A = 1\nX = E(1)",
        "import json\nT = {}\nT.update(a=1)",
        "import json\ndef f(): return 1\nf()",
        "import json, functools\n@functools.wraps(json.dumps)\ndef f(): return 1",
    ],
)
def test_what_concerns_the_module_alone_is_no_effect(project, after):
    assert effects(project, "import json", after) == []


def test_functions_that_are_only_handed_on_are_not_registered_again(project, monkeypatch):
    calls: list[object] = []
    monkeypatch.setattr(json, "hook", calls.append, raising=False)
    text = "import json\ndef work(): return {}\njson.hook(work)\n"
    project.write_module("m", text.format(1))
    project.watch("m")
    m = project.load("m")
    project.write_module("m", text.format(2))
    report = project.reload()
    assert calls == [m.work]
    assert (calls[0](), report.effects) == (2, [])
