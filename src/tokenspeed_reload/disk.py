"""The state of the disk, compared with what runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

from tokenspeed_reload.errors import ReloadError, describe
from tokenspeed_reload.loader import SourceFinder, within
from tokenspeed_reload.records import Change, Kind, ModuleRecord, Records, SourceText


class Disk:
    """Reads the sources of the recorded modules, the overlay before the installed files."""

    def __init__(self, packages: Sequence[str], overlay: Path | None, records: Records, finder: SourceFinder) -> None:
        self._packages = packages
        self._overlay = overlay
        self._records = records
        self._finder = finder
        self._known: set[str] | None = None
        self._noted: dict[str, SourceText] = {}

    def current(self, record: ModuleRecord) -> SourceText | None:
        """What a recorded module would be loaded from now, or None when its file is gone.

        A module may have become a package, or a package a module.

        Raises:
            ReloadError: the file is there and cannot be read.
        """
        file = self._finder.overlay_file(record.name) or record.origin
        for path in (file, _other_form(file)):
            try:
                return SourceText(path, _content(path))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise ReloadError("read", describe(error), module=record.name, file=path) from error
        return None

    def changes(self) -> list[Change]:
        """Compare the content of all files with what last ran."""
        found: list[Change] = []
        for name, record in sorted(self._records.modules.items()):
            source = self.current(record)
            reloadable = within(name, self._packages) and self._records.live(name) is not None
            if source is None:
                found.append(Change(name, record.source.path, "deleted", reloadable))
            elif source.data != record.source.data or record.is_left:
                found.append(Change(name, source.path, "edited", reloadable))
        if self._known is not None:
            files = self.files()
            fresh = sorted(set(files) - self._known - self._records.modules.keys())
            found.extend(Change(name, files[name], "new", True) for name in fresh)
        found.extend(Change(name, file, kind, False) for name, file, kind in self._beside())
        return found

    def note_beside(self, packages: Sequence[str], recorded: Sequence[str]) -> None:
        """Remember the files of `packages`, apart from those below `recorded`, to tell later which changed."""
        for package in packages:
            for root in _locations(package):
                for name, file in _walk(package, root):
                    if not within(name, recorded):
                        with suppress(OSError):
                            self._noted[name] = SourceText(file, _content(file))

    def _beside(self) -> Iterator[tuple[str, str, Kind]]:
        for name, source in sorted(self._noted.items()):
            try:
                if _content(source.path) != source.data:
                    yield name, source.path, "edited"
            except FileNotFoundError:
                yield name, source.path, "deleted"
            except OSError as error:
                raise ReloadError("read", describe(error), module=name, file=source.path) from error

    def note_files(self) -> None:
        """Take the present files of the packages as known; later ones are "new"."""
        self._known = set(self.files())

    def unloaded(self) -> dict[str, SourceText]:
        """The sources of modules in the packages that are not loaded, apart from those that cannot be read."""
        found: dict[str, SourceText] = {}
        for name, file in self.files().items():
            if name not in sys.modules:
                with suppress(OSError):  # a dangling link, say: it matters only if something imports it
                    found[name] = SourceText(file, _content(file))
        return found

    def read(self, name: str) -> SourceText:
        """The present source of a recorded module; raises ReloadError when it cannot be read."""
        record = self._records.modules[name]
        source = self.current(record)
        if source is None:
            raise ReloadError("read", "its source file is gone; put it back", module=name, file=record.source.path)
        return source

    def roots(self) -> list[str]:
        """The directories and files in which the packages lie, the overlay first."""
        found = [str(self._overlay)] if self._overlay is not None else []
        for package in self._packages:
            locations = _locations(package)
            record = self._records.modules.get(package)
            if not locations and record is not None:
                locations = [record.source.path]
            found.extend(locations)
        return list(dict.fromkeys(found))

    def strays(self) -> list[str]:
        """The Python files of the overlay that are no recorded module: nothing ever reads them."""
        if self._overlay is None:
            return []
        found: list[str] = []
        for directory, folders, files in os.walk(self._overlay):
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
            parts = Path(directory).relative_to(self._overlay).parts
            for file in sorted(files):
                stem, suffix = os.path.splitext(file)  # noqa: PTH122
                name = ".".join(parts if stem == "__init__" else (*parts, stem))
                if suffix == ".py" and name not in self._records.modules:
                    found.append(str(Path(directory, file)))
        return found

    def files(self) -> dict[str, str]:
        """All Python files of the packages by module name; a file of the overlay hides the installed one."""
        found: dict[str, str] = {}
        for package in self._packages:
            roots = _locations(package)
            if self._overlay is not None:
                roots = [*roots, str(self._overlay.joinpath(*package.split(".")))]
            for root in roots:
                found.update(_walk(package, root))
        return found


def _content(file: str) -> bytes:
    """The bytes of a file. A reload reads all files, and `Path` would take longer than the disk."""
    with open(file, "rb") as opened:  # noqa: PTH123
        return opened.read()


def _other_form(file: str) -> str:
    """The file of the package instead of the module, or the other way round."""
    directory, name = os.path.split(file)
    stem = os.path.splitext(name)[0]  # noqa: PTH122
    return f"{directory}.py" if stem == "__init__" else os.path.join(directory, stem, "__init__.py")  # noqa: PTH118


def _locations(package: str) -> list[str]:
    """The directories of a package, told by its nearest loaded parent, or `sys.path`; nothing is imported."""
    parts = package.split(".")
    for count in range(len(parts), 0, -1):
        path = getattr(sys.modules.get(".".join(parts[:count])), "__path__", None)
        if path is not None:
            break
    else:
        spec = PathFinder.find_spec(parts[0]) if parts[0] not in sys.modules else None
        path = (spec.submodule_search_locations if spec is not None else None) or ()
    directories = [str(Path(entry, *parts[count:])) if parts[count:] else str(entry) for entry in path]
    return [entry for entry in directories if os.path.isdir(entry)]  # noqa: PTH112


def _walk(package: str, root: str) -> Iterator[tuple[str, str]]:
    root = os.path.normpath(root)
    for directory, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f.isidentifier() and f != "__pycache__")
        below = directory[len(root) :].replace(os.sep, ".")
        for file in sorted(files):
            stem, suffix = os.path.splitext(file)  # noqa: PTH122
            if suffix == ".py" and stem.isidentifier():
                name = f"{package}{below}" if stem == "__init__" else f"{package}{below}.{stem}"
                yield name, f"{directory}{os.sep}{file}"
