"""The loader hook: it decides which bytes of a module run, and records them."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from tokenspeed_reload.errors import ReloadError, describe
from tokenspeed_reload.records import ModuleRecord, Origin, Records, SourceText


def within(name: str, prefixes: Sequence[str]) -> bool:
    """True when `name` is one of `prefixes` or lies below one of them."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def compile_source(source: SourceText) -> CodeType:
    """Compile a module as the import system would; raises SyntaxError or ValueError."""
    return compile(source.data, source.path, "exec", dont_inherit=True)


class RecordingLoader(SourceFileLoader):
    """Runs a module from given bytes, never from a pyc file, and records them.

    Args:
        name: the module's name.
        source: what to run.
        origin: the installed file.
        records: where to record it.
        inner: the loader of another reloader that records the module too, if there is one.
        tell: called with a sentence once the module has run.
    """

    def __init__(
        self,
        name: str,
        source: SourceText,
        origin: str,
        records: Records,
        inner: RecordingLoader | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(name, source.path)
        self._source = source
        self._origin = origin
        self._records = records
        self._inner = inner
        self._tell = tell

    def get_code(self, fullname: str) -> CodeType:
        """Compile the bytes, unless the module ran already, and record what will run."""
        record = self._records.modules.get(fullname)
        if record is not None and record.source is self._source:
            return record.code
        return compile_source(self._source)

    def get_source(self, fullname: str) -> str:
        """The text that runs."""
        record = self._records.modules.get(fullname)
        return record.source.text if record is not None else self._source.text

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module; one that fails leaves no record."""
        name = module.__name__
        tell, self._tell = self._tell, None  # the module keeps its loader, and must not keep the reload
        code = compile_source(self._source)
        everyone = self._everyone()
        previous = [records.modules.get(name) for records in everyone]
        for records in everyone:
            records.add(ModuleRecord(name, self._source, code, self._origin))
        try:
            exec(code, module.__dict__)
        except BaseException:
            for records in everyone:
                records.forget(name)
            for records, record in zip(everyone, previous, strict=True):
                if record is not None:
                    records.add(record)
            raise
        for records in everyone:
            records.note_names(name, module.__dict__)
        if tell is not None:
            tell(f"the run of {name}")

    def _everyone(self) -> list[Records]:
        return [self._records, *(self._inner._everyone() if self._inner is not None else ())]


class SourceFinder(MetaPathFinder):
    """The first finder of `sys.meta_path`; it serves the modules of the recorded packages.

    A module is taken from the sources of a reload in progress, then from what another process ran (`kept`), then from
    the overlay directory, then from wherever the other finders have it.
    """

    def __init__(self, prefixes: Sequence[str], overlay: Path | None, records: Records) -> None:
        self._prefixes = prefixes
        self._overlay = overlay
        self._records = records
        self.serving: dict[str, SourceText] = {}
        self.kept: Mapping[str, Origin] = {}
        self.tell: Callable[[str], None] | None = None
        """Called with a sentence for each module, of any package, that is imported, and once one of the recorded
        packages has run."""
        self._asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of the recorded packages that has Python source."""
        if self.tell is not None:
            self.tell(f"the import of {fullname}")
        if not within(fullname, self._prefixes):
            return None
        base = self._find_elsewhere(fullname, path, target)
        source = self.serving.get(fullname)
        if source is None and fullname in self.kept and fullname not in self._records.modules:
            return self._kept_spec(fullname, self.kept[fullname], base)
        origin = _source_path(base)
        if source is None:
            file = self.overlay_file(fullname) or origin
            if file is None:
                return base
            source = SourceText(str(file), Path(file).read_bytes())
        return self._spec(fullname, source, origin, base)

    def others(self) -> list[Records]:
        """What the other reloaders of this process know of its modules."""
        return [f._records for f in sys.meta_path if isinstance(f, SourceFinder) and f is not self]

    def overlay_file(self, name: str) -> str | None:
        """The file of module `name` in the overlay directory, or None."""
        if self._overlay is None:
            return None
        stem = f"{self._overlay}{os.sep}{name.replace('.', os.sep)}"
        for file in (f"{stem}{os.sep}__init__.py", f"{stem}.py"):
            if os.path.isfile(file):  # noqa: PTH113 - it does not raise where a directory cannot be read
                return file
        return None

    def adopt(self, name: str, module: ModuleType) -> None:
        """Record a module that was imported before the hook stood, from the file it came from.

        Raises:
            ReloadError: the file cannot be read, or no longer compiles: what runs is then unknown.
        """
        spec = getattr(module, "__spec__", None)
        file = _source_path(spec)
        if file is None or name in self._records.modules:
            return
        for records in self.others():
            if name in records.modules:
                self._records.add(records.modules[name])
                return
        try:
            source = SourceText(file, Path(file).read_bytes())
            code = compile_source(source)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ReloadError("read", describe(error), module=name, file=file) from error
        self._records.add(ModuleRecord(name, source, code, file))

    def _find_elsewhere(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        asked: set[str] = vars(self._asking).setdefault("names", set())
        if fullname in asked:  # a finder after this one asks all finders in its turn
            return None
        asked.add(fullname)
        try:
            return self._ask(fullname, path, target)
        finally:
            asked.discard(fullname)

    def _ask(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        finders = list(sys.meta_path)
        if self in finders:  # those before it have been asked already
            finders = finders[finders.index(self) + 1 :]
        for finder in finders:
            if not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None

    def _kept_spec(self, name: str, kept: Origin, base: ModuleSpec | None) -> ModuleSpec | None:
        """The spec of a module that another process ran, though the disk may hold another form of it, or none."""
        spec = self._spec(name, kept.source, kept.file, base if kept.source.is_package else None)
        if spec is not None and kept.source.is_package and base is None:
            spec.submodule_search_locations = [os.path.dirname(kept.file)]  # noqa: PTH120
        return spec

    def spec_of(self, name: str, source: SourceText, origin: str) -> ModuleSpec | None:
        """The spec of a module that runs `source`."""
        return self._spec(name, source, origin, None)

    def _spec(self, name: str, source: SourceText, origin: str | None, base: ModuleSpec | None) -> ModuleSpec | None:
        locations = list(base.submodule_search_locations or ()) if base is not None else []
        if source.is_package and not locations:
            locations = [os.path.dirname(source.path)]  # noqa: PTH120
        inner = base.loader if base is not None and isinstance(base.loader, RecordingLoader) else None
        if inner is not None and inner._records is self._records:
            inner = None
        loader = RecordingLoader(name, source, origin or source.path, self._records, inner, self.tell)
        spec = importlib.util.spec_from_file_location(
            name, source.path, loader=loader, submodule_search_locations=locations or None
        )
        if spec is not None:
            spec.cached = None
        return spec


def _source_path(spec: ModuleSpec | None) -> str | None:
    if spec is None or spec.origin is None or not spec.has_location:
        return None
    suffixes = tuple(importlib.machinery.SOURCE_SUFFIXES)
    is_source = spec.origin.endswith(suffixes) and os.path.isfile(spec.origin)  # noqa: PTH113
    return spec.origin if is_source else None
