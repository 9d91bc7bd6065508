"""What a package gives on: its own file, its modules, or the way to them is edited; and files in every state."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenspeed_reload import ReloadError

INITS = {
    "from": "from pkg.k import f, C, T, A\n",
    "relative": "from .k import f, C, T, A\n",
    "as": "from .k import f as f, C as C, T, A\n",
    "all": "from .k import *\n__all__ = ['f', 'C', 'T', 'A']\n",
    "module": "import pkg.k as _k\nf, C, T, A = _k.f, _k.C, _k.T, _k.A\n",
    "from package": "from . import k as _k\nf, C, T, A = _k.f, _k.C, _k.T, _k.A\n",
    "lazy": "def __getattr__(name):\n    if name.startswith('__'): raise AttributeError(name)\n"
    "    import pkg.k as k\n    return getattr(k, name)\n",
    "lazy table": "import importlib\n_WHERE = {'f': 'k', 'C': 'k', 'T': 'k', 'A': 'k'}\ndef __getattr__(name):\n"
    "    if name not in _WHERE: raise AttributeError(name)\n"
    "    return getattr(importlib.import_module('.' + _WHERE[name], __name__), name)\n",
    "lazy that keeps": "import importlib\ndef __getattr__(name):\n"
    "    if name.startswith('__'): raise AttributeError(name)\n"
    "    value = globals()[name] = getattr(importlib.import_module('pkg.k'), name)\n    return value\n",
    "update": "from . import k as _k\nglobals().update({n: v for n, v in vars(_k).items() if not n.startswith('_')})\n",
    "loop": "from . import k as _k\nfor _n in ('f', 'C', 'T', 'A'):\n    globals()[_n] = getattr(_k, _n)\n",
    "deep": "from .mid import *\n",
}
K = "C = 1\nT = (1, [])\ndef f(): return C\nclass A:\n    def m(self): return C\n"
USERS = {
    "from": "from pkg import f, C, T, A\nY = (C, T[0], f(), A().m())\n",
    "module": "import pkg\nY = (pkg.C, pkg.T[0], pkg.f(), pkg.A().m())\n",
    "as": "import pkg as p\nY = (p.C, p.T[0], p.f(), p.A().m())\n",
    "in function": "def g():\n    from pkg import f, C, T, A\n    return (C, T[0], f(), A().m())\nY = g()\n",
}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("init", INITS)
def test_what_a_package_gives_on_follows(project, picture, init, user):
    project.write(pkg__init=INITS[init], pkg__k=K, pkg__mid="from .k import f, C, T, A\n", u=USERS[user])
    project.watch("pkg", "u")
    u, pkg = project.load("u"), project.load("pkg")
    f, a = pkg.f, pkg.A()
    assert u.Y == (1, 1, 1, 1)
    before = picture({"a": a}, ["pkg", "u"])
    project.write(pkg__k=K.replace("C = 1", "C = 2").replace("(1, [])", "(2, [])"))
    transaction = project.reloader.reload()
    assert (pkg.C, pkg.T[0], pkg.f is f, f(), a.m(), type(a) is pkg.A) == (2, 2, True, 2, 2, True)
    assert u.Y == (2, 2, 2, 2)
    assert transaction.report.stale == []
    transaction.swap()
    assert picture({"a": a}, ["pkg", "u"]) == before
    transaction.swap()
    transaction.commit()
    assert project.reload().objects_patched == 0


@pytest.mark.parametrize("init", [name for name in INITS if "lazy" not in name])
def test_an_edit_of_the_package_itself(project, init):
    project.write(pkg__init=INITS[init], pkg__k=K, pkg__mid="from .k import f, C, T, A\n", u=USERS["from"])
    project.watch("pkg", "u")
    u, pkg = project.load("u"), project.load("pkg")
    f = pkg.f
    project.write(pkg__init=INITS[init] + "C = 5\nMORE = C\n")
    project.reload()
    assert (pkg.C, pkg.MORE, u.C, u.Y, pkg.f is f) == (5, 5, 5, (5, 1, 1, 1), True)
    project.write(pkg__init=INITS[init])
    project.reload()
    assert (pkg.C, hasattr(pkg, "MORE"), u.Y, pkg.f is f) == (1, False, (1, 1, 1, 1), True)


def test_a_name_that_the_package_no_longer_gives_on(project):
    project.write(pkg__init="from .k import f, g\n__all__ = ['f', 'g']", pkg__k="def f(): return 1\ndef g(): return 1")
    project.write_module("u", "from pkg import *\nNAMES = sorted(n for n in globals() if len(n) == 1)")
    project.watch("pkg", "u")
    u = project.load("u")
    project.write(pkg__init="from .k import f\n__all__ = ['f']")
    project.reload()
    assert (hasattr(u, "g"), u.NAMES) == (False, ["f"])


def test_one_package_in_another_and_back_to_it(project):
    project.write(pkg__init="from .sub import V\nW = V", pkg__sub__init="from .. import base\nV = base.B * 2")
    project.write(pkg__base="B = 1", u="import pkg.sub.leaf as pkg\nX = pkg.L")
    project.write(pkg__sub__leaf="from ..base import B\nfrom . import V\nfrom .. import W\nL = (B, V, W)")
    project.watch("pkg", "u")
    u = project.load("u")
    assert u.X == (1, 2, 2)
    project.write(pkg__base="B = 3")
    project.reload()
    assert u.X == (3, 6, 6)


def test_modules_that_import_each_other_through_their_package(project):
    project.write(pkg__init="from . import a, b\nfrom .a import fa\nfrom .b import fb\n")
    project.write(pkg__a="from . import b\nX = 1\ndef fa(): return b.Y + X\n", pkg__b="Y = 10\n")
    project.write(pkg__b="from . import a\nY = 10\ndef fb(): return a.X + Y\n")
    project.watch("pkg")
    pkg = project.load("pkg")
    fa, fb = pkg.fa, pkg.fb
    project.write(pkg__a="from . import b\nX = 2\ndef fa(): return b.Y + X\n")
    project.reload()
    assert (fa(), fb(), pkg.fa is fa, pkg.fb is fb) == (12, 12, True, True)
    project.write(pkg__b="from . import a\nY = 20\ndef fb(): return a.X - Y\n")
    project.reload()
    assert (fa(), fb()) == (22, -18)


def test_a_namespace_package(project):
    project.write(
        space__a="X = 1\ndef f(): return X", space__deep__b="from space.a import X, f\nfrom .. import a\nY = X, a.X"
    )
    project.write(u="import space.deep.b\nfrom space import a\nZ = space.deep.b.Y")
    project.watch("space", "u")
    u = project.load("u")
    f = u.a.f
    project.write(space__a="X = 2\ndef f(): return X * 2")
    project.reload()
    assert (u.Z, f(), sys.modules["space.deep.b"].Y) == ((2, 2), 4, (2, 2))
    project.write(space__fresh="V = 1", space__a="from .fresh import V\nX = 3\ndef f(): return V")
    project.reload()
    assert (u.Z, f()) == ((3, 3), 1)
    project.write(space__init="S = 1\n", space__a="X = 4\ndef f(): return 4")
    project.reload()
    assert f() == 4


def test_a_renamed_module_of_a_package(project, picture):
    project.write(pkg__init="from .old import f\n", u="from pkg import f\nfrom pkg.old import X\nY = X")
    path = project.write_module("pkg.old", "X = 1\ndef f(): return 1")
    project.watch("pkg", "u")
    u = project.load("u")
    before = picture({}, ["pkg", "u"])
    path.rename(path.with_name("new.py"))
    project.write(pkg__init="from .new import f\n", u="from pkg import f\nfrom pkg.new import X\nY = X + 1")
    transaction = project.reloader.reload()
    assert (u.Y, u.f is sys.modules["pkg.new"].f) == (2, True)
    assert any("pkg.old" in note for note in transaction.report.notes)
    transaction.undo()
    assert picture({}, ["pkg", "u"]) == before
    assert "pkg.new" not in sys.modules


def test_a_deleted_module_that_is_imported_still_is_an_error_only_where_it_is_new(project):
    path = project.write_module("k", "X = 1")
    project.write_module("m", "import k\nY = k.X")
    project.watch("k", "m")
    m = project.load("m")
    path.unlink()
    project.write_module("m", "import k\nY = k.X + 1")
    report = project.reload()
    assert m.Y == 2
    assert any("k is gone" in note for note in report.notes)
    project.write_module("k", "X = 5")
    project.reload()
    assert m.Y == 6


def test_a_file_that_went_is_told_once_and_to_who_asks(project):
    uses = "Y = {}\ndef later():\n    import k\n"
    path = project.write_module("k", "X = 1")
    project.write_module("m", uses.format(1))
    reloader = project.watch("k", "m")
    project.load("k")
    project.load("m")
    gone = ["the file of k is gone; the module was left as it runs"]
    path.unlink()
    project.write_module("m", uses.format(2))
    transaction = reloader.reload()
    assert transaction.report.notes == gone
    transaction.undo()
    assert project.reload().notes == gone  # who undid the first one was told of nothing that stayed
    project.write_module("m", uses.format(3))
    assert project.reload().notes == []
    assert reloader.plan().notes == gone
    assert [(c.module, c.kind) for c in reloader.changed()] == [("k", "deleted")]
    project.write_module("k", "X = 1")
    project.reload()
    path.unlink()
    assert project.reload().notes == gone


TEXT = "X = {}\ndef f():\n    return X\n"
STATES: dict[str, Callable[[Path], object]] = {
    "null bytes": lambda path: path.write_bytes(b"X = 2\0\n"),
    "not UTF-8": lambda path: path.write_bytes(b"X = '\xff'\n"),
    "unknown encoding": lambda path: path.write_bytes(b"# coding: nothing\nX = 2\n"),
    "half an edit": lambda path: path.write_text("X = 2\ndef f(:\n"),
    "deep nesting": lambda path: path.write_text("X = " + "(" * 500 + ")" * 500),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a loop of links": lambda path: (path.unlink(), path.symlink_to(path)),
    "no text": lambda path: path.write_bytes(bytes(range(256))),
    "conflict marks": lambda path: path.write_text("<<<<<<< HEAD\nX = 2\n=======\nX = 3\n>>>>>>> other\n"),
    "two encodings": lambda path: path.write_bytes(b"\xef\xbb\xbf# coding: latin-1\nX = 2\n"),
}


@pytest.mark.parametrize("state", STATES)
def test_a_file_that_cannot_be_run(project, picture, state):
    path = project.write_module("m", TEXT.format(1))
    project.write_module("n", "Z = 1")
    project.watch("m", "n")
    m, n = project.load("m"), project.load("n")
    before = picture({}, ["m", "n"])
    STATES[state](path)
    project.write_module("n", "Z = 2")
    for call in (project.reloader.reload, project.reloader.plan):
        try:
            result = call()
        except ReloadError as error:
            assert (error.module, error.file) == ("m", str(path))
            assert picture({}, ["m", "n"]) == before
        else:  # a file that is gone, whatever stands in its place now
            assert state == "a directory"
            assert any("m is gone" in note for note in result.notes)
            if not isinstance(getattr(result, "undo", None), type(None)):
                result.undo()
    if path.is_dir():
        path.rmdir()
    elif path.is_symlink():
        path.unlink()
    path.write_text(TEXT.format(3))
    project.reload()
    assert (m.f(), n.Z) == (3, 2)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n\n",
        b"# only a comment",
        b'"""Only a text."""',
        b"\xef\xbb\xbfX = 2\r\ndef f():\r\n    return X\r\n",
        b"# -*- coding: utf-8 -*-\nX = 2\ndef f():\n    return X\n",
        "# vim: set fileencoding=latin-1 :\nX = '\xe4'\ndef f(): return X\n".encode("latin-1"),
        b"X = 2\ndef f():\n\treturn X",
        b"\x0cX = 2\n\x0c\ndef f(): return X",
    ],
    ids=["empty", "blank", "comment", "text", "bom crlf", "cookie", "latin-1", "tabs", "form feeds"],
)
def test_a_file_of_another_form_and_back(project, picture, data):
    path = project.write_module("m", TEXT.format(1))
    project.watch("m")
    m = project.load("m")
    f, before = m.f, picture({}, ["m"])
    path.write_bytes(data)
    fresh = types.ModuleType("m")
    exec(compile(data, str(path), "exec"), vars(fresh))
    transaction = project.reloader.reload()
    assert {n: v for n, v in vars(m).items() if n == "X"} == {n: v for n, v in vars(fresh).items() if n == "X"}
    assert hasattr(m, "f") == hasattr(fresh, "f")
    assert not hasattr(m, "f") or (m.f is f and f() == fresh.f())
    transaction.undo()
    assert picture({}, ["m"]) == before
    project.reload()
    path.write_text(TEXT.format(1))
    project.reload()
    assert (m.X, m.f()) == (1, 1)


def test_links_to_files_and_directories(project, tmp_path):
    real = tmp_path / "real"
    (real / "inner").mkdir(parents=True)
    (real / "m_one.py").write_text("X = 1\n")
    (real / "m_two.py").write_text("X = 2\n")
    (real / "inner" / "__init__.py").write_text("")
    (real / "inner" / "deep.py").write_text("X = 1\n")
    link = tmp_path / "linked.py"
    link.symlink_to(real / "m_one.py")
    (tmp_path / "tree").symlink_to(real / "inner")
    project.watch("linked", "tree")
    linked, deep = project.load("linked"), project.load("tree.deep")
    (real / "m_one.py").write_text("X = 10\n")
    (real / "inner" / "deep.py").write_text("X = 10\n")
    project.reload()
    assert (linked.X, deep.X) == (10, 10)
    link.unlink()
    link.symlink_to(real / "m_two.py")
    project.reload()
    assert linked.X == 2
    fresh = tmp_path / "fresh.py"
    fresh.write_text("X = 3\n")
    fresh.replace(link)
    project.reload()
    assert (linked.X, project.reloader.changed()) == (3, [])


@pytest.mark.parametrize("late", ["X = 'late'\n", "def (", b"\0", None])
def test_a_file_that_changes_while_the_reload_runs(project, late):
    """The edited module itself writes to the files that the reload has read, and to its own."""
    k = project.write_module("k", "Y = 1")
    m = project.write_module("m", "import k\nX = k.Y")
    project.watch("k", "m")
    module = project.load("m")
    text = "import pathlib\n"
    for path in (k, m):
        if late is None:
            text += f"pathlib.Path({str(path)!r}).unlink()\n"
        else:
            data = late if isinstance(late, bytes) else late.encode()
            text += f"pathlib.Path({str(path)!r}).write_bytes({data!r})\n"
    k.write_text(text + "Y = 2\n")
    m.write_text("import k\nX = k.Y + 1\ndef f():\n    return X\n")
    project.reload()
    assert (module.X, module.f()) == (3, 3)
    import inspect

    assert inspect.getsource(module.f) == "def f():\n    return X\n"
    if late is None:
        assert [c.kind for c in project.reloader.changed()] == ["deleted", "deleted"]
    else:
        assert [c.module for c in project.reloader.changed()] == ["k", "m"]


OPTIONAL = """
try:
    from pk.fast import run as impl
except ImportError:
    def impl(): return "slow"
def go(): return impl()
"""


def test_an_optional_module_that_comes_is_taken(project, picture):
    project.write(pk__init="", pk__m=OPTIONAL, pk__u="from pk.m import impl, go\ndef both(): return impl(), go()")
    reloader = project.watch("pk")
    m, u = project.load("pk.m"), project.load("pk.u")
    held = {"go": m.go, "both": u.both, "slow": m.impl}
    before = picture(held, ["pk"])
    project.write(pk__fast="def run(): return 'fast'")
    assert [c.kind for c in reloader.changed()] == ["new"]
    assert ("pk.m", "uses pk.fast") in [(r.name, r.why) for r in reloader.plan().modules]
    transaction = reloader.reload()
    assert (held["go"](), held["both"]()) == ("fast", ("fast", "fast"))
    assert "pk.m.impl" in [s.definition for s in transaction.report.stale]
    transaction.undo()
    assert picture(held, ["pk"]) == before
    assert held["both"]() == ("slow", "slow")
    project.reload()
    assert held["both"]() == ("fast", "fast")
    assert project.reload().modules == []


def test_an_optional_module_that_was_always_there_and_fails_is_not_tried_again(project):
    project.write(pk__init="", pk__m=OPTIONAL, pk__fast="import no_such_module_x")
    reloader = project.watch("pk")
    m = project.load("pk.m")
    assert reloader.changed() == []
    assert project.reload().modules == []
    assert m.go() == "slow"
