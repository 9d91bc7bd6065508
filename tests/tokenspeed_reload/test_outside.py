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


@pytest.mark.parametrize(
    "after",
    [
        "import json\nX = json.dumps([1])",
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
