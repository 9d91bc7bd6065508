"""A forward package on disk, and edits of it in place, as a reloader makes them."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import pytest

_numbers = itertools.count()


class ForwardPackage:
    """Modules of a fresh package, importable by the `{pkg}` that their sources name."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.directory = root / name
        self.directory.mkdir()
        (self.directory / "__init__.py").touch()

    def load(self, sources: dict[str, str]) -> dict[str, ModuleType]:
        for module, source in sources.items():
            (self.directory / f"{module}.py").write_text(source.replace("{pkg}", self.name))
        importlib.invalidate_caches()
        return {module: importlib.import_module(f"{self.name}.{module}") for module in sources}

    def patch(self, sources: dict[str, str]) -> None:
        """Run new sources and write what they define into the live modules, keeping identities."""
        for module, source in sources.items():
            live = vars(sys.modules[f"{self.name}.{module}"])
            new = {key: live[key] for key in ("__name__", "__package__", "__file__", "__spec__", "__builtins__")}
            exec(compile(source.replace("{pkg}", self.name), live["__file__"], "exec"), new)
            for key, value in new.items():
                if not key.startswith("__") and not patch_object(live.get(key), value, live):
                    live[key] = value


def patch_object(live: Any, new: Any, scope: dict[str, Any]) -> bool:
    """Make the live object behave as the new one, keeping its identity; False where it must be replaced."""
    if type(live) is not type(new) or live is new:
        return live is new
    if isinstance(live, FunctionType):
        patch_function(live, new, scope)
    elif isinstance(live, type) and live.__module__ == scope["__name__"]:
        for key, value in vars(new).items():
            if isinstance(value, GetSetDescriptorType | MemberDescriptorType):
                continue
            if not patch_object(vars(live).get(key), value, scope):
                type.__setattr__(live, key, value)
    elif isinstance(live, staticmethod | classmethod):
        patch_object(live.__func__, new.__func__, scope)
    elif isinstance(live, partial):
        patch_object(live.func, new.func, scope)
    elif isinstance(live, MethodType):
        patch_object(live.__func__, new.__func__, scope)
    elif hasattr(live, "fn"):
        patch_object(live.fn, new.fn, scope)
    elif isinstance(live, list):
        live[:] = new
    elif isinstance(live, dict):
        live.clear()
        live.update(new)
    elif hasattr(live, "cache_clear"):
        live.cache_clear()
        patch_object(live.__wrapped__, new.__wrapped__, scope)
    else:
        return False
    return True


def patch_function(live: FunctionType, new: FunctionType, scope: dict[str, Any]) -> None:
    if live.__globals__ is scope:
        live.__code__, live.__defaults__, live.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__
        vars(live).update(vars(new))
    for old, cell in zip(live.__closure__ or (), new.__closure__ or (), strict=True):
        # A __class__ cell and a function's own name keep pointing at the live objects.
        own = old.cell_contents is live or isinstance(old.cell_contents, type)
        if not own and not patch_object(old.cell_contents, cell.cell_contents, scope):
            old.cell_contents = cell.cell_contents


@pytest.fixture
def forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForwardPackage]:
    monkeypatch.syspath_prepend(tmp_path)
    package = ForwardPackage(tmp_path, f"fwd{next(_numbers)}")
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] in (package.name, "jitlib")]:
        del sys.modules[name]
