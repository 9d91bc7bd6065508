"""What the reloader knows of each module: the bytes that last ran."""

from __future__ import annotations

import hashlib
import importlib.util
import linecache
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal

from tokenspeed_reload.values import is_a

Kind = Literal["edited", "new", "deleted"]


@dataclass(frozen=True)
class SourceText:
    """One source file as it was read: its path and its bytes."""

    path: str
    data: bytes

    @property
    def is_package(self) -> bool:
        """True for the `__init__.py` of a package."""
        return self.path.replace("\\", "/").endswith("/__init__.py")

    @cached_property
    def text(self) -> str:
        """The decoded text, with the encoding that the source declares."""
        return importlib.util.decode_source(self.data)

    def line(self, number: int | None) -> str | None:
        """A line, counted from 1, without its indentation; None where there is none."""
        lines = self.data.splitlines()  # of bytes: as the compiler counts, which knows no form feeds
        return lines[number - 1].decode(errors="replace").strip() if number and number <= len(lines) else None

    @cached_property
    def sha256(self) -> str:
        """The hash of the bytes, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Origin:
    """Where a module comes from: the source that it runs, and the installed file, which may be another one."""

    source: SourceText
    file: str


@dataclass(frozen=True)
class Change:
    """A module whose source differs from what last ran.

    Attributes:
        module: its name.
        path: the file that was looked at.
        kind: "edited", "new" (a file that no one has imported yet) or "deleted".
        reloadable: True when the module lies in the reloadable packages.
    """

    module: str
    path: str
    kind: Kind
    reloadable: bool


@dataclass
class Sources:
    """All that a reload reads; two processes given equal sources run equal code.

    Attributes:
        modules: the sources of the modules to execute, by module name.
        unloaded: the sources of modules that are not loaded yet; new imports are served from them.
        named: True when the caller named the modules.
        pending: names of reloadable modules that changed but are left for later.
        outside: names of changed modules outside of the reloadable packages.
        deleted: names of loaded modules whose file is gone.
        unused: those of `deleted` that nothing uses any more: they are forgotten.
        new: names of those that are not loaded and whose file has come since the last commit.
    """

    modules: dict[str, SourceText] = field(default_factory=dict)
    unloaded: dict[str, SourceText] = field(default_factory=dict)
    named: bool = False
    pending: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    def notes(self, told: Collection[str] = ()) -> list[str]:
        """What to say of modules that stay without a file, one sentence each, but for those in `told`."""
        gone = [name for name in self.deleted if name not in (*told, *self.unused)]
        return [f"the file of {name} is gone; the module was left as it runs" for name in gone]


@dataclass(frozen=True)
class ModuleRecord:
    """The source that a module last ran.

    Attributes:
        name: the module's name.
        source: its path and bytes.
        code: the compiled module; its nested code objects are those of the live functions.
        origin: the installed file, which differs from the source's path when an overlay was used.
        names: what the module bound when it ran, None while that is unknown; names set later from outside are
            not among them.
        members: the attributes that its classes and functions had then, by their qualified names.
        is_left: its file went, and a definition of it moved to another module: it runs anew when the file comes back.
    """

    name: str
    source: SourceText
    code: CodeType
    origin: str
    names: frozenset[str] | None = None
    members: Mapping[str, frozenset[str]] = field(default_factory=dict)
    is_left: bool = False


class Records:
    """The records of all modules that the loader hook saw, and their text pinned for tracebacks."""

    def __init__(self) -> None:
        self.modules: dict[str, ModuleRecord] = {}

    def live(self, name: str) -> ModuleType | None:
        """The loaded module of that name if its source is known, else None."""
        module = sys.modules.get(name)
        return module if name in self.modules and isinstance(module, ModuleType) else None

    def add(self, record: ModuleRecord) -> None:
        """Take `record` as what runs, and pin its text."""
        self.modules[record.name] = record
        pin(record.source)

    def note_names(self, name: str, namespace: Mapping[str, Any], foreign: Collection[str] = ()) -> None:
        """Remember what module `name` bound when it ran; `foreign` are names that others put into it."""
        names = frozenset(namespace.keys() - foreign)
        self.modules[name] = replace(self.modules[name], names=names, members=_members(name, namespace))

    def forget(self, name: str) -> None:
        """Drop what is known of module `name`, if anything."""
        record = self.modules.pop(name, None)
        if record is not None:
            linecache.cache.pop(record.source.path, None)


def lines_of(text: str) -> list[str]:
    """The lines with their ends, as the compiler counts them: a form feed ends none."""
    return text.splitlines(keepends=True) if text.isascii() and not _RARE_ENDS.search(text) else _split(text)


_RARE_ENDS = re.compile("[\x0b\x0c\x1c-\x1e]")


def _split(text: str) -> list[str]:
    return [line for line in re.split("(?<=\n)", text) if line]


def _members(name: str, namespace: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    todo: list[Any] = list(namespace.values())
    for value in todo:
        is_class = is_a(value, type)
        if not (is_class or type(value) is FunctionType) or value.__module__ != name or value.__qualname__ in found:
            continue
        own = vars(value)
        if is_class or own:
            found[value.__qualname__] = frozenset(own)
        if is_class:
            todo.extend(own.values())
    return found


LineCacheEntry = tuple[int, None, list[str], str]


def line_cache_entry(source: SourceText) -> LineCacheEntry:
    """The entry that shows `source`; without a time it is never checked against the disk."""
    return (len(source.data), None, lines_of(source.text), source.path)


def pin(source: SourceText) -> None:
    """Make tracebacks and `inspect` show the text that runs, whatever the disk holds."""
    linecache.cache[source.path] = line_cache_entry(source)
