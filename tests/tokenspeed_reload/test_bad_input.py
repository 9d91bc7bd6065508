"""What a reload is given that it cannot use, or that looks odd: named in one sentence, or simply right."""

from __future__ import annotations

import importlib
import importlib.machinery
import py_compile
import shutil
import sys
import types

import pytest

from tokenspeed_reload import Reloader, ReloadError, UnknownModules


def test_each_unknown_module_is_told_with_its_reason(project, monkeypatch):
    project.write_module("m", "X = 1")
    project.write_module("pkg.__init__", "")
    project.watch("m", "pkg", "math", "posing")
    project.load("m")
    monkeypatch.setitem(sys.modules, "pkg.none", None)
    monkeypatch.setitem(sys.modules, "posing", object())
    names = ["pkg.never", "json", "math", "posing", "m"]
    with pytest.raises(UnknownModules) as caught:
        project.reloader.reload(names)
    assert caught.value.reasons == {
        "pkg.never": "it is not loaded",
        "json": "it lies outside of them",
        "math": "it has no Python source",
        "posing": "another object took its place in sys.modules",
    }
    assert "pkg.never (it is not loaded)" in str(caught.value)


SMALL_EXTENSIONS = ("_heapq", "_bisect", "_json", "_queue", "_csv", "_zoneinfo")
"""Each of them is a part of the interpreter itself in some builds."""


def test_modules_without_source_are_refused_by_name_and_the_rest_is_reloaded(project):
    """One that exists as a pyc file only, and an extension."""
    library = next(filter(has_file, map(importlib.import_module, SMALL_EXTENSIONS)), None)
    if library is None:
        pytest.skip("all extensions are parts of this interpreter")
    native = library.__name__
    project.write(pkg__init="", pkg__bare="X = 1\ndef f(): return X")
    source = project.root / "pkg" / "bare.py"
    py_compile.compile(str(source), str(source.with_suffix(".pyc")), doraise=True)
    source.unlink()
    shutil.copy(library.__file__, project.root / "pkg")
    text = f"from pkg import bare, {native} as native\nfrom pkg.bare import f\nY = {{}}\ndef g(): return Y, f()"
    project.write(pkg__m=text.format(1))
    reloader = project.watch("pkg")
    m = project.load("pkg.m")
    before = m.native
    project.write(pkg__m=text.format(2))
    with pytest.raises(UnknownModules) as caught:
        reloader.reload(["pkg.bare", f"pkg.{native}", "pkg.m"])
    assert caught.value.reasons == dict.fromkeys(["pkg.bare", f"pkg.{native}"], "it has no Python source")
    assert [c.module for c in reloader.changed()] == ["pkg.m"]
    report = project.reload()
    assert ([r.name for r in report.modules], m.g(), m.native is before) == (["pkg.m"], (2, 1), True)
    project.write(pkg__bare="X = 5\ndef f(): return X")  # its source comes back: nobody knows what runs
    assert [c.module for c in reloader.changed()] in ([], ["pkg.bare"])
    project.write(pkg__m=text.format(3))
    project.reload()
    assert m.g() == (3, 1)


def has_file(module: types.ModuleType) -> bool:
    """True for an extension that is a file of its own."""
    file = getattr(module, "__file__", None) or ""
    return file.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))


def test_a_module_that_put_another_object_in_its_place_does_no_harm(project):
    project.write_module("odd", "import sys\nclass P: pass\nsys.modules[__name__] = P()")
    project.write_module("m", "import odd\nX = 1")
    project.watch("odd", "m")
    m = project.load("m")
    project.write_module("m", "import odd\nX = 2")
    project.write_module("odd", "import sys\nclass P: pass\nsys.modules[__name__] = P()\nY = 1")
    report = project.reload()
    assert m.X == 2
    assert [n.what for n in report.needs_restart] == ["odd"]


def test_a_module_becomes_a_package_and_back(project):
    project.write_module("m", "import lib\nfrom lib import f\ndef g(): return f(), lib.K")
    path = project.write_module("lib", "K = 1\ndef f(): return 1")
    reloader = project.watch("m", "lib")
    m = project.load("m")
    lib, held = m.lib, m.f
    path.unlink()
    inner = project.write_module("lib.__init__", "from .part import V\nK = 2\ndef f(): return V")
    project.write_module("lib.part", "V = 5")
    transaction = reloader.reload()
    assert (m.g(), held(), m.lib is lib, lib.__package__) == ((5, 2), 5, True, "lib")
    assert sys.modules["lib.part"].V == 5
    transaction.swap()
    assert (m.g(), hasattr(lib, "__path__"), lib.__package__, "lib.part" in sys.modules) == ((1, 1), False, "", False)
    transaction.commit()
    assert project.reload().modules == []
    project.write_module("lib.part", "V = 6")
    project.reload()
    assert held() == 6
    inner.unlink()
    project.write_module("lib", "K = 3\ndef f(): return 3")
    project.reload()
    assert (m.g(), hasattr(lib, "__path__")) == ((3, 3), False)


def test_a_renamed_module(project):
    project.write_module("m", "from old import f\ndef g(): return f()")
    path = project.write_module("old", "def f(): return 1")
    project.watch("m", "old", "new")
    m = project.load("m")
    path.unlink()
    project.write_module("new", "def f(): return 2")
    project.write_module("m", "from new import f\ndef g(): return f()")
    report = project.reload()
    assert m.g() == 2
    assert any("old" in note for note in report.notes)


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbfX = 2\ndef f():\n    raise ValueError",
        b"X = 2\r\ndef f():\r\n    raise ValueError\r\n",
        b"X = 2\rdef f():\r    raise ValueError\r",
        b"X = 2\n\x0cdef f():\n\x0c    raise ValueError\n",
        b"# -*- coding: latin-1 -*-\nX = 2; S = '\xe9'\ndef f():\n    raise ValueError",
        "X = 2; S = 'a\u2028b\x85c'\ndef f():\n    raise ValueError".encode(),
        b"X = 2\n\ndef f():\n    raise ValueError  \\\n        ('a')",
    ],
    ids=["bom", "crlf", "cr", "form feed", "latin-1", "separators", "continued"],
)
def test_odd_but_valid_text(project, data):
    import inspect

    path = project.write_module("m", "X = 1\ndef f(): raise ValueError")
    reloader = project.watch("m")
    m = project.load("m")
    path.write_bytes(data)
    project.reload()
    assert m.X == 2
    with pytest.raises(ValueError) as caught:
        m.f()
    trace = caught.value.__traceback__.tb_next
    assert inspect.getsource(m.f).replace("\x0c", "").startswith("def f():\n    raise ValueError")
    assert trace.tb_lineno == m.f.__code__.co_firstlineno + 1
    path.write_bytes(data.replace(b"X = 2", b"X = 3"))
    project.reload()
    assert m.X == 3
    assert reloader.changed() == []


@pytest.mark.parametrize("depth", [900, 3000, 40000])
def test_deep_nesting_lands_or_is_refused_before_anything_is_touched(project, depth, picture):
    path = project.write_module("m", "X = 1")
    project.watch("m")
    m = project.load("m")
    before = picture({}, ["m"])
    path.write_text("X = " + "+".join(["1"] * depth) + "\ndef f(): return " + "-" * (depth // 10) + "1\n")
    try:
        project.reload()
    except ReloadError as error:
        assert error.phase in ("read", "patch")
        assert picture({}, ["m"]) == before
    else:
        assert depth == m.X


def test_files_that_cannot_be_adopted_are_named(project):
    path = project.write_module("m", "X = 1")
    project.load("m")
    project.names.append("m")
    path.write_text("def (")
    with pytest.raises(ReloadError, match="SyntaxError") as caught:
        Reloader(packages=["m"]).install()
    assert (caught.value.module, caught.value.file) == ("m", str(path))
    path.unlink()
    path.mkdir()
    reloader = Reloader(packages=["m"])
    reloader.install()
    reloader.uninstall()
    with pytest.raises(UnknownModules):
        reloader.reload(["m"])


def test_an_unreadable_directory_does_no_harm(project, monkeypatch):
    project.write_module("pkg.__init__", "X = 1")
    pkg_dir = project.root / "pkg" / "sub"
    pkg_dir.mkdir()
    project.watch("pkg", overlay=project.root / "overlay")
    pkg = project.load("pkg")
    pkg_dir.chmod(0)
    try:
        project.write_module("pkg.__init__", "X = 2")
        project.reload()
    finally:
        pkg_dir.chmod(0o755)
    assert pkg.X == 2


def test_a_module_object_that_is_a_subclass(project):
    project.write_module("m", "import sys, types\nclass M(types.ModuleType): pass\nX = 1")
    project.watch("m")
    m = project.load("m")
    m.__class__ = type("Lazy", (types.ModuleType,), {"__getattr__": lambda self, name: name})
    project.write_module("m", "import sys, types\nclass M(types.ModuleType): pass\nX = 2")
    project.reload()
    assert (m.X, m.other) == (2, "other")


HOSTILE = """
class Proxy:
    @property
    def __class__(self): raise RuntimeError("nothing is bound")
    def __getattr__(self, name): raise RuntimeError("nothing is bound")
    def __eq__(self, other): raise RuntimeError("nothing is bound")
    def __bool__(self): raise RuntimeError("nothing is bound")
    def __repr__(self): raise RuntimeError("nothing is bound")
class Closed:
    def __getattribute__(self, name): raise RuntimeError("closed")
    def __setattr__(self, name, value): raise RuntimeError("closed")
proxy, closed = Proxy(), Closed()
TABLE = {"proxy": proxy, "closed": closed}
"""


@pytest.mark.parametrize("edited", ["", "    extra = 1\n"], ids=["unchanged", "class edited"])
def test_objects_that_answer_nothing_do_no_harm(project, edited):
    project.write_module("m", HOSTILE + "def f(a=proxy, b=closed): return 1")
    project.write_module("u", "from m import proxy, closed, TABLE\nall = [proxy, closed]")
    project.watch("m", "u")
    project.load("u")
    m = project.load("m")
    f = m.f
    lines = HOSTILE.replace("class Closed:\n", "class Closed:\n" + edited)
    project.write_module("m", lines + "def f(a=proxy, b=closed): return 2")
    transaction = project.reloader.reload()
    transaction.swap()
    assert f() == 1
    transaction.swap()
    transaction.commit()
    assert f() == 2 and m.f is f
