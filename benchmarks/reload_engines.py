"""Runs before/after cases through one reloader; `reload_scenarios.py` starts it in the reloader's own environment.

Reads a list of cases as JSON from standard input, and writes which of them hold as a JSON object. Each case runs in a
forked process of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS_A_CASE = 20


class Engine:
    """How a reloader is used in a program whose modules lie in one directory.

    Attributes:
        libraries: the modules of the reloader, which are imported once, before the cases fork.
        names: the modules, providers before users.
        root: the directory.
    """

    libraries: tuple[str, ...] = ()

    def __init__(self, root: Path, names: list[str]) -> None:
        self.root = root
        self.names = names

    def start(self) -> None:
        """Called before the modules are imported."""

    def loaded(self) -> None:
        """Called when they are imported."""

    def reload(self, edited: list[str]) -> None:
        """Called after these modules were edited."""
        raise NotImplementedError

    def path(self, name: str) -> Path:
        """The file of a module."""
        return self.root / f"{name}.py"


class TokenSpeedReload(Engine):
    """This project's reloader."""

    libraries = ("tokenspeed_reload",)

    def start(self) -> None:
        from tokenspeed_reload import Reloader

        self._reloader = Reloader(packages=self.names)
        self._reloader.install()

    def reload(self, edited: list[str]) -> None:
        self._reloader.reload_and_commit()


class Importlib(Engine):
    """`importlib.reload` of every module, since it knows no users."""

    def reload(self, edited: list[str]) -> None:
        for name in self.names:
            importlib.reload(sys.modules[name])


class IPythonAutoreload(Engine):
    """`%autoreload 2`: what changed is reloaded before the next cell."""

    libraries = ("IPython.core.interactiveshell", "IPython.extensions.autoreload")
    takes_new_objects = False

    def loaded(self) -> None:
        from IPython.core.interactiveshell import InteractiveShell
        from IPython.extensions.autoreload import ModuleReloader

        self._reloader: Any = ModuleReloader(InteractiveShell())
        self._reloader.enabled = True
        self._reloader.autoload_obj = self.takes_new_objects
        self._reloader.hide_errors = True

    def reload(self, edited: list[str]) -> None:
        self._reloader.check(check_all=True)


class IPythonComplete(IPythonAutoreload):
    """`%autoreload 3`: new objects of a module come to the cells as well."""

    takes_new_objects = True


class Jurigged(Engine):
    """jurigged, told of each edited file."""

    libraries = ("jurigged", "jurigged.register")

    def start(self) -> None:
        from jurigged.register import registry

        self._registry: Any = registry
        registry.auto_register(filter=lambda file: file.startswith(str(self.root)))

    def loaded(self) -> None:
        for name in self.names:
            self._registry.get(str(self.path(name)))

    def reload(self, edited: list[str]) -> None:
        for name in edited:
            self._registry.get(str(self.path(name))).refresh()


class XReload(Engine):
    """xreload of every module, since it knows no users."""

    libraries = ("xreload",)

    def reload(self, edited: list[str]) -> None:
        from xreload import xreload

        for name in self.names:
            xreload(sys.modules[name])


class Hmr(Engine):
    """hmr, with an entry file that imports the modules."""

    libraries = ("reactivity.hmr.core", "watchfiles")

    def start(self) -> None:
        from reactivity.hmr.core import HMR_CONTEXT, SyncReloader

        entry = self.root / "entry_of_hmr.py"
        entry.write_text("\n".join(f"import {name}" for name in self.names))
        self._reloader: Any = SyncReloader(str(entry), [str(self.root)])
        self._effect = HMR_CONTEXT.effect(self._reloader.run_entry_file)

    def reload(self, edited: list[str]) -> None:
        self._reloader.on_changes({self.path(name).resolve() for name in edited})
        for name in self.names:
            dir(sys.modules[name])


ENGINES: dict[str, type[Engine]] = {
    "tokenspeed_reload": TokenSpeedReload,
    "jurigged": Jurigged,
    "IPython autoreload 2": IPythonAutoreload,
    "IPython autoreload 3": IPythonComplete,
    "xreload": XReload,
    "importlib.reload": Importlib,
    "hmr": Hmr,
}


def catches(function: Callable[[], Any], kind: type[BaseException]) -> bool:
    """True when calling `function` raises `kind`."""
    try:
        function()
    except kind:
        return True
    return False


def raised_line(function: Callable[[], Any]) -> int | None:
    """The line on which the ValueError of `function` was raised."""
    try:
        function()
    except ValueError as error:
        return traceback.extract_tb(error.__traceback__)[-1].lineno
    return None


def holds(case: dict[str, Any], engine: type[Engine], root: Path) -> bool:
    """Run one case; an edit that is refused is no failure, what counts is what holds then."""
    for name, text in case["before"].items():
        (root / f"{name}.py").write_text(text)
    sys.path.insert(0, str(root))
    names = list(case["before"])
    reloader = engine(root, names)
    reloader.start()
    for name in names:
        importlib.import_module(name)
    reloader.loaded()
    held: dict[str, Any] = {"catches": catches, "raised_line": raised_line}
    exec(case["hold"], held)
    for name, text in case["after"].items():
        path = root / f"{name}.py"
        before = path.stat()
        path.write_text(text)
        later = 0 if case.get("same_size_same_mtime") else 10_000_000_000
        os.utime(path, ns=(before.st_atime_ns + later, before.st_mtime_ns + later))
    importlib.invalidate_caches()
    with contextlib.suppress(Exception):
        reloader.reload([name for name in names if name in case["after"]])
    return bool(eval(case["expect"], held))


def in_own_process(case: dict[str, Any], engine: type[Engine]) -> bool:
    """Run one case in a fork; one that crashes or does not end does not hold."""
    with tempfile.TemporaryDirectory() as root:
        child = os.fork()
        if child == 0:
            result = 1
            try:
                signal.alarm(SECONDS_A_CASE)
                silence = os.open(os.devnull, os.O_WRONLY)
                os.dup2(silence, 1)
                os.dup2(silence, 2)
                result = 0 if holds(case, engine, Path(root)) else 1
            finally:
                os._exit(result)
        _, status = os.waitpid(child, 0)
        return status == 0


def main() -> None:
    sys.dont_write_bytecode = True
    engine = ENGINES[sys.argv[1]]
    for library in engine.libraries:
        importlib.import_module(library)
    cases = json.load(sys.stdin)
    json.dump({case["id"]: in_own_process(case, engine) for case in cases}, sys.stdout)


if __name__ == "__main__":
    main()
