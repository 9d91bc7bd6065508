"""A small program on disk that the tests edit, and a deep picture of a process to compare."""

from __future__ import annotations

import gc
import importlib
import itertools
import linecache
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import Any

import pytest

from tokenspeed_reload import Reloader, Report


class Project:
    """Modules in a directory of `sys.path`, and the reloader that watches them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reloader = Reloader(packages=[])
        self.names: list[str] = []

    def write(self, **sources: str) -> None:
        """Write modules; a double underscore in a name stands for a dot, and `pkg__` for a package."""
        for name, text in sources.items():
            self.write_module(name.replace("__", ".").replace(".init", ".__init__"), text)

    def write_module(self, name: str, text: str) -> Path:
        """Write one module by its dotted name; `pkg.__init__` is a package's own file."""
        path = self.root.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        importlib.invalidate_caches()
        return path

    def watch(self, *packages: str, **options: Any) -> Reloader:
        """Start watching."""
        self.reloader = Reloader(packages=packages, **options)
        self.names = [*packages, *options.get("watch", ())]
        self.reloader.install()
        return self.reloader

    def load(self, name: str) -> ModuleType:
        """Import one of the modules."""
        return importlib.import_module(name)

    def reload(self, *modules: str) -> Report:
        """Reload and commit."""
        return self.reloader.reload_and_commit(modules or None)

    def close(self) -> None:
        """Forget the modules."""
        self.reloader.uninstall()
        for name in list(sys.modules):
            if any(name == n or name.startswith(n + ".") for n in self.names):
                del sys.modules[name]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    project = Project(tmp_path)
    yield project
    project.close()


def deep_picture(roots: dict[str, Any], modules: list[str]) -> list[Any]:
    """All that is reached from `roots` and `modules` by identity and content, as a flat list."""
    picture: list[Any] = [("loaded", [n for n in sys.modules if n.split(".")[0] in {m.split(".")[0] for m in modules}])]
    todo: list[Any] = [*roots.items(), *((n, sys.modules[n]) for n in modules if n in sys.modules)]
    todo = [value for _, value in todo]
    seen: set[int] = set()
    for module in modules:
        path = getattr(sys.modules.get(module), "__file__", None)
        picture.append(("text", module, linecache.cache.get(path) if path else None))
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        entry, inner = _look(value, modules)
        picture.append((id(value), type(value).__name__, entry))
        todo.extend(inner)
    return picture


def _look(value: Any, modules: list[str]) -> tuple[Any, list[Any]]:
    if isinstance(value, ModuleType):
        if value.__name__ not in modules:
            return None, []
        return [(k, id(v)) for k, v in vars(value).items()], [v for k, v in vars(value).items() if k != "__builtins__"]
    if isinstance(value, FunctionType):
        parts = [
            value.__code__,
            value.__defaults__,
            value.__kwdefaults__,
            value.__annotations__,
            value.__doc__,
        ]
        entry = [id(parts[0]), *map(repr, parts[1:]), value.__qualname__, value.__name__]
        return entry, [*(value.__closure__ or ()), value.__dict__, *parts[1:4]]
    if isinstance(value, CellType):
        try:
            return id(value.cell_contents), [value.cell_contents]
        except ValueError:
            return None, []
    if isinstance(value, type):
        if value.__module__ not in modules:
            return None, []
        members = [(k, id(v)) for k, v in vars(value).items()]
        return [members, [id(b) for b in value.__bases__]], [*vars(value).values(), *value.__bases__]
    if type(value) is dict:
        return [(id(k), id(v)) for k, v in value.items()], [*value.keys(), *value.values()]
    if type(value) in (list, tuple):
        return [id(v) for v in value], list(value)
    if type(value) in (set, frozenset):
        return sorted(map(id, value)), list(value)
    if isinstance(value, property):
        return [id(value.fget), id(value.fset), id(value.fdel), value.__doc__], [
            value.fget,
            value.fset,
            value.fdel,
        ]
    if isinstance(value, staticmethod | classmethod):
        return id(value.__func__), [value.__func__]
    if hasattr(value, "__wrapped__"):
        return id(value.__wrapped__), [value.__wrapped__]
    if type(value).__module__ in modules and hasattr(value, "__dict__"):
        return [(k, id(v)) for k, v in vars(value).items()], list(vars(value).values())
    return None, []


@pytest.fixture
def picture() -> Callable[[dict[str, Any], list[str]], list[Any]]:
    return deep_picture


_STAMPS = itertools.count(1)


@pytest.fixture
def keep_stamp() -> Callable[[Path, str], None]:
    """Edit a file so that its size and time stay what they were."""

    def edit(path: Path, text: str) -> None:
        before = path.stat()
        path.write_text(text, encoding="utf-8")
        assert path.stat().st_size == before.st_size
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    return edit


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Objects of an earlier test must not be taken for holders in this one."""
    gc.collect()
    yield
