"""Which bytes run: the loader hook, the overlay, and the sources that a caller hands over."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import linecache
import os
import py_compile
import shutil
import sys

import pytest

from tokenspeed_reload import Origin, Reloader, ReloadError, Sources, SourceText, UnknownModules


def test_what_ran_is_recorded_and_shown_although_the_disk_changed(project):
    path = project.write_module("m", "def f():\n    return 'old'\n")
    reloader = project.watch("m")
    m = project.load("m")
    path.write_text("def f():\n    return 'newer'\n")
    linecache.checkcache()
    assert "old" in inspect.getsource(m.f)
    assert reloader.records.modules["m"].source.data == b"def f():\n    return 'old'\n"
    assert [c.module for c in reloader.changed()] == ["m"]
    assert m.f() == "old"


def test_a_pyc_file_is_ignored(project):
    path = project.write_module("m", "X = 1\n")
    py_compile.compile(str(path))
    stamp = path.stat()
    path.write_text("X = 2\n")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    project.watch("m")
    assert project.load("m").X == 2


def test_edit_of_same_size_and_time_is_seen(project, keep_stamp):
    path = project.write_module("m", "X = 1\n")
    reloader = project.watch("m")
    m = project.load("m")
    assert reloader.changed() == []
    keep_stamp(path, "X = 2\n")
    assert [(c.module, c.kind, c.reloadable) for c in reloader.changed()] == [("m", "edited", True)]
    project.reload()
    assert m.X == 2


def test_overlay_wins_at_start_and_at_reload(project, tmp_path):
    overlay = tmp_path / "overlay"
    project.write_module("pkg.__init__", "")
    project.write_module("pkg.a", "X = 'installed'")
    project.write_module("pkg.b", "X = 'installed'")
    (overlay / "pkg").mkdir(parents=True)
    (overlay / "pkg" / "a.py").write_text("X = 'overlay'\n")
    reloader = project.watch("pkg", overlay=overlay)
    a, b = project.load("pkg.a"), project.load("pkg.b")
    assert (a.X, b.X) == ("overlay", "installed")
    (overlay / "pkg" / "b.py").write_text("X = 'overlay'\n")
    assert [(c.module, c.path) for c in reloader.changed()] == [("pkg.b", str(overlay / "pkg" / "b.py"))]
    project.reload()
    assert b.X == "overlay"
    assert b.__file__ == str(overlay / "pkg" / "b.py")
    (overlay / "pkg" / "a.py").unlink()
    project.reload()
    assert a.X == "installed"
    assert str(overlay) in reloader.looked_at()


def test_a_method_that_lost_its_decorator_follows_into_the_overlay_and_back(project, tmp_path):
    """Its cell cannot be taken away, so that its new code is fitted to it: that stands in another file each time."""
    plain = "class A:\n    def f(self, x):\n        return x\n"
    project.write_module("pkg.__init__", "")
    project.write_module("pkg.a", plain)
    project.watch("pkg", overlay=tmp_path / "overlay")
    a = project.load("pkg.a").A()
    overlaid = tmp_path / "overlay" / "pkg" / "a.py"
    overlaid.parent.mkdir(parents=True)
    decorated = plain.replace("    def", "    @twice\n    def")
    overlaid.write_text(f"def twice(function):\n    return lambda *args: function(*args) * 2\n\n{decorated}")
    project.reload()
    assert a.f(1) == 2
    overlaid.unlink()
    assert project.reload().stale == []
    assert a.f(1) == 1
    overlaid.write_text(plain.replace("return x", "return x + 10"))
    assert project.reload().stale == []
    assert a.f(1) == 11


def test_module_that_only_the_overlay_has(project, tmp_path):
    overlay = tmp_path / "overlay"
    project.write_module("pkg.__init__", "")
    (overlay / "pkg" / "sub").mkdir(parents=True)
    (overlay / "pkg" / "sub" / "__init__.py").write_text("")
    (overlay / "pkg" / "sub" / "c.py").write_text("X = 1\n")
    project.watch("pkg", overlay=overlay)
    assert project.load("pkg.sub.c").X == 1


def test_files_of_the_overlay_that_are_no_loaded_module_are_strays(project, tmp_path):
    overlay = tmp_path / "overlay"
    project.write_module("pkg.__init__", "")
    project.write_module("pkg.a", "X = 1")
    reloader = project.watch("pkg", overlay=overlay)
    project.load("pkg.a")
    files = ["pkg/__init__.py", "pkg/a.py", "a.py", "pkg/aa.py", "src/pkg/a.py", ".git/x.py", "pkg/notes.txt"]
    for file in files:
        (overlay / file).parent.mkdir(parents=True, exist_ok=True)
        (overlay / file).write_text("X = 2\n")
    assert reloader.strays() == [str(overlay / file) for file in ("a.py", "pkg/aa.py", "src/pkg/a.py")]
    project.load("pkg.aa")
    assert reloader.strays() == [str(overlay / file) for file in ("a.py", "src/pkg/a.py")]


def test_modules_loaded_before_the_hook_are_adopted(project):
    project.write_module("m", "X = 1")
    m = project.load("m")
    project.watch("m")
    project.write_module("m", "X = 2")
    project.reload()
    assert m.X == 2


def test_a_module_whose_import_fails_leaves_no_record(project):
    project.write_module("m", "raise ValueError('no')")
    reloader = project.watch("m")
    with pytest.raises(ValueError, match="no"):
        project.load("m")
    assert "m" not in reloader.records.modules
    project.write_module("m", "X = 1")
    assert project.load("m").X == 1


def test_other_finders_locate_the_module(project, tmp_path):
    """As an editable install does."""
    home = tmp_path / "elsewhere"
    home.mkdir()
    (home / "editable_mod.py").write_text("X = 1\n")

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "editable_mod":
                return importlib.util.spec_from_file_location(name, home / "editable_mod.py")
            return None

    sys.meta_path.append(Finder)
    try:
        project.watch("editable_mod")
        module = project.load("editable_mod")
        (home / "editable_mod.py").write_text("X = 2\n")
        project.reload()
        assert module.X == 2
    finally:
        sys.meta_path.remove(Finder)


def test_package_without_init(project):
    project.write_module("space.a", "X = 1")
    project.watch("space")
    a = project.load("space.a")
    project.write_module("space.a", "X = 2")
    project.reload()
    assert a.X == 2


def test_given_sources_run_whatever_the_disk_holds(project):
    path = project.write_module("m", "X = 1\ndef f(): return X\n")
    reloader = project.watch("m")
    m = project.load("m")
    data = b"X = 5\ndef f():\n    return X * 2\n"
    path.write_text("this is not Python")
    reloader.reload(sources=Sources(modules={"m": SourceText(str(path), data)})).commit()
    assert m.f() == 10
    assert "X * 2" in inspect.getsource(m.f)


def test_new_imports_are_served_from_the_sources(project):
    project.write_module("pkg.__init__", "")
    project.write_module("pkg.m", "X = 1")
    project.write_module("pkg.helper", "Y = 7")
    reloader = project.watch("pkg")
    m = project.load("pkg.m")
    project.write_module("pkg.m", "from pkg.helper import Y\nX = Y")
    sources = reloader.read()
    assert set(sources.modules) == {"pkg.m"}
    assert "pkg.helper" in sources.unloaded
    project.write_module("pkg.helper", "Y = 'read too late'")
    reloader.reload(sources=sources).commit()
    assert m.X == 7


def test_undo_forgets_new_modules_and_swap_brings_them_back(project):
    project.write_module("pkg.__init__", "")
    project.write_module("pkg.m", "X = 1")
    project.write_module("pkg.helper", "Y = 7")
    reloader = project.watch("pkg")
    m, pkg = project.load("pkg.m"), project.load("pkg")
    project.write_module("pkg.m", "import pkg.helper\nX = pkg.helper.Y")
    transaction = reloader.reload()
    assert m.X == 7
    transaction.swap()
    assert "pkg.helper" not in sys.modules
    assert not hasattr(pkg, "helper")
    transaction.swap()
    assert pkg.helper is sys.modules["pkg.helper"]
    transaction.undo()
    assert "pkg.helper" not in sys.modules
    assert "pkg.helper" not in reloader.records.modules
    assert (m.X, hasattr(pkg, "helper")) == (1, False)


def test_new_and_deleted_files_are_told(project):
    project.write_module("pkg.__init__", "")
    path = project.write_module("pkg.m", "X = 1")
    reloader = project.watch("pkg")
    m = project.load("pkg.m")
    reloader.reload_and_commit()
    project.write_module("pkg.fresh", "X = 1")
    path.unlink()
    assert [(c.module, c.kind) for c in reloader.changed()] == [("pkg.m", "deleted"), ("pkg.fresh", "new")]
    report = project.reload()
    assert m.X == 1
    assert "pkg.m" in report.notes[0]


def test_unknown_names_are_refused_before_anything_happens(project):
    project.write_module("m", "X = 1")
    reloader = project.watch("m")
    project.load("m")
    with pytest.raises(UnknownModules) as caught:
        reloader.reload(["m", "nothing", "os"])
    assert caught.value.names == ["nothing", "os"]


def test_named_module_whose_file_is_gone(project):
    path = project.write_module("m", "X = 1")
    reloader = project.watch("m")
    project.load("m")
    path.unlink()
    with pytest.raises(ReloadError) as caught:
        reloader.reload(["m"])
    assert (caught.value.phase, caught.value.module) == ("read", "m")


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"X = 1\ndef f(:\n", 2),
        (b"X = 1\nreturn 2\n", 2),
        (b"\xff\xfe\x00", 1),
        (b"X = 1\n\nY = 2\0", 3),
        (b"X = 1\n# \xe9\n", 2),
        (b"# first\n# coding: klingon\nX = 1\n", 2),
    ],
)
def test_bytes_that_do_not_compile(project, data, line):
    path = project.write_module("m", "X = 1")
    reloader = project.watch("m")
    m = project.load("m")
    path.write_bytes(data)
    with pytest.raises(ReloadError) as caught:
        reloader.reload()
    assert (caught.value.phase, caught.value.module, caught.value.line) == ("read", "m", line)
    assert m.X == 1


def test_a_file_that_cannot_be_read_is_named(project):
    path = project.write_module("m", "X = 1")
    reloader = project.watch("m")
    project.load("m")
    path.unlink()
    path.symlink_to("/proc/self/mem")
    with pytest.raises(ReloadError) as caught:
        reloader.read()
    assert (caught.value.phase, caught.value.module, caught.value.file) == ("read", "m", str(path))


def test_a_dangling_link_that_no_one_imports_does_no_harm(project):
    project.write_module("pkg.__init__", "")
    project.write_module("pkg.m", "X = 1")
    project.watch("pkg")
    m = project.load("pkg.m")
    (project.root / "pkg" / "lock.py").symlink_to("nowhere")
    project.write_module("pkg.m", "X = 2")
    project.reload()
    assert m.X == 2


def test_functions_follow_when_the_file_moves_to_the_overlay(project, tmp_path):
    text = "def mark(f): return f\ndef f(): return 1\ndef g(): return 1\n"
    project.write_module("m", text)
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    project.watch("m", overlay=overlay)
    m = project.load("m")
    f, g = m.f, m.g
    (overlay / "m.py").write_text(text.replace("def f(): return 1", "def f(): return 2"))
    project.reload()
    assert {f.__code__.co_filename, g.__code__.co_filename} == {str(overlay / "m.py")}
    (overlay / "m.py").write_text(text.replace("def g(): return 1", "@mark\ndef g(): return 3"))
    report = project.reload()
    assert (m.g is g, g(), f(), report.stale) == (True, 3, 1, [])


def test_encoding_may_change(project):
    path = project.write_module("m", "X = 'ä'")
    project.watch("m")
    m = project.load("m")
    path.write_bytes("# -*- coding: latin-1 -*-\nX = 'ö'\n".encode("latin-1"))
    project.reload()
    assert m.X == "ö"


def test_edits_beside_the_recorded_packages_are_told(project):
    project.write_module("app.__init__", "")
    project.write_module("app.server", "X = 1")
    project.write_module("app.model.__init__", "")
    project.write_module("app.model.layer", "X = 1")
    project.names.append("app")
    project.load("app")
    reloader = project.watch("app.model", beside=["app"])
    project.names.append("app")
    layer = project.load("app.model.layer")
    assert reloader.changed() == []
    path = project.write_module("app.server", "X = 2")
    project.write_module("app.model.layer", "X = 2")
    assert [(c.module, c.reloadable) for c in reloader.changed()] == [("app.model.layer", True), ("app.server", False)]
    report = project.reload()
    assert (layer.X, [n.what for n in report.needs_restart]) == (2, ["app.server"])
    assert "does not run here" in report.needs_restart[0].why
    path.unlink()
    assert [(c.module, c.kind) for c in reloader.changed()] == [("app.server", "deleted")]
    assert project.reload().notes == []


def test_constructor_only_stores():
    before = list(sys.meta_path)
    reloader = Reloader(packages=["no_such_package"])
    assert sys.meta_path == before
    assert reloader.changed() == []
    assert reloader.looked_at() == []


def test_importlib_reload_keeps_the_record_right(project):
    project.write_module("m", "X = 1")
    reloader = project.watch("m")
    m = project.load("m")
    project.write_module("m", "X = 2")
    importlib.reload(m)
    assert (m.X, reloader.changed()) == (2, [])


class AsksAll:
    """A finder that asks all others, as import hooks do that wrap what those find."""

    def find_spec(self, name, path, target=None):
        others = [f for f in sys.meta_path if f is not self]
        return next(filter(None, (f.find_spec(name, path, target) for f in others)), None) if name == "m" else None


def test_two_reloaders_of_one_module(project, monkeypatch):
    project.write_module("m", "X = 1\ndef f(): return X")
    monkeypatch.setattr(sys, "meta_path", [AsksAll(), *sys.meta_path])
    first, second = project.watch("m"), Reloader(["m"])
    second.install()
    m = project.load("m")
    f = m.f
    project.write_module("m", "X = 2\ndef f(): return X * 2")
    assert [c.module for c in first.changed()] == [c.module for c in second.changed()] == ["m"]
    first.reload_and_commit()
    assert (f(), m.f, second.changed()) == (4, f, [])
    project.write_module("m", "X = 3\ndef f(): return X * 3\ndef g(): return f()")
    second.reload().undo()
    assert (f(), hasattr(m, "g")) == (4, False)
    second.reload_and_commit()
    assert (f(), m.g(), first.changed(), first.reload_and_commit().objects_patched) == (9, 9, [], 0)
    third = Reloader(["m"])
    project.write_module("m", "X = 4\ndef f(): return X")
    third.install()
    assert [c.module for c in third.changed()] == ["m"]


def again(project, *packages, **options):
    """Another process that takes the place of this one: it keeps what this one ran."""
    kept = {name: Origin(record.source, record.origin) for name, record in project.reloader.records.modules.items()}
    project.close()
    importlib.invalidate_caches()
    reloader = Reloader(packages=packages, **options)
    reloader.keep(kept)
    project.reloader = reloader
    reloader.install()
    return reloader


def test_another_process_runs_what_this_one_ran(project):
    project.write_module("pkg.__init__", "from pkg.a import f")
    path = project.write_module("pkg.a", "def f():\n    return 'first'\n")
    project.watch("pkg")
    project.load("pkg.a")
    path.write_text("def f():\n    return 'committed'\n")
    project.reload()
    path.write_text("this is not Python")
    reloader = again(project, "pkg")
    pkg = project.load("pkg")
    assert pkg.f() == "committed"
    assert "committed" in inspect.getsource(pkg.f)
    assert [(c.module, c.kind) for c in reloader.changed()] == [("pkg.a", "edited")]
    with pytest.raises(ReloadError):
        reloader.reload()
    path.write_text("def f():\n    return 'mended'\n")
    reloader.reload_and_commit()
    assert pkg.f() == "mended"


def test_what_is_kept_need_not_be_on_the_disk(project):
    project.write_module("pkg.__init__", "X = 1")
    project.write_module("pkg.sub.__init__", "Y = 2")
    project.write_module("pkg.sub.m", "Z = 3")
    project.watch("pkg")
    project.load("pkg.sub.m")
    shutil.rmtree(project.root / "pkg")
    reloader = again(project, "pkg")
    m = project.load("pkg.sub.m")
    assert (m.Z, sys.modules["pkg"].X, sys.modules["pkg.sub"].Y) == (3, 1, 2)
    assert {c.module for c in reloader.changed() if c.kind == "deleted"} == {"pkg", "pkg.sub", "pkg.sub.m"}
    project.write_module("pkg.sub.m", "Z = 4")
    reloader.reload_and_commit()
    assert m.Z == 4


def test_a_kept_module_may_have_become_a_package_and_a_package_a_module(project):
    module = project.write_module("pkg.one", "X = 'module'")
    package = project.write_module("pkg.two.__init__", "X = 'package'")
    project.write_module("pkg.two.part", "X = 'part'")
    project.write_module("pkg.__init__", "")
    project.watch("pkg")
    project.load("pkg.one")
    project.load("pkg.two.part")
    module.unlink()
    project.write_module("pkg.one.__init__", "X = 'a package now'")
    shutil.rmtree(package.parent)
    project.write_module("pkg.two", "X = 'a module now'")
    again(project, "pkg")
    one = project.load("pkg.one")
    assert one.X == "module"
    assert not hasattr(one, "__path__")
    assert project.load("pkg.two.part").X == "part"
    assert project.load("pkg.two").X == "package"


def test_what_is_kept_of_an_overlay_is_compared_with_the_overlay(project, tmp_path):
    project.write_module("pkg.__init__", "X = 'installed'")
    project.write_module("pkg.m", "Y = 'installed'")
    overlay = tmp_path / "overlay"
    (overlay / "pkg").mkdir(parents=True)
    (overlay / "pkg" / "__init__.py").write_text("X = 'overlaid'")
    project.watch("pkg", overlay=overlay)
    project.load("pkg.m")
    (overlay / "pkg" / "__init__.py").write_text("X = 'edited'")
    reloader = again(project, "pkg", overlay=overlay)
    assert project.load("pkg").X == "overlaid"
    assert project.load("pkg.m").Y == "installed"
    assert [c.path for c in reloader.changed()] == [str(overlay / "pkg" / "__init__.py")]
    shutil.rmtree(overlay)
    reloader.reload_and_commit()
    assert project.load("pkg").X == "installed"


def test_modules_that_were_not_kept_come_from_the_disk(project):
    project.write_module("pkg.__init__", "")
    project.write_module("pkg.a", "X = 1")
    project.watch("pkg")
    project.load("pkg.a")
    project.write_module("pkg.b", "X = 2")
    again(project, "pkg")
    assert project.load("pkg.b").X == 2
