"""Modules that a reload imports for the first time: an undo forgets them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

from tokenspeed_reload.loader import within
from tokenspeed_reload.records import ModuleRecord, Records
from tokenspeed_reload.undo import AddedEntry, Record, UndoLog
from tokenspeed_reload.values import is_a


class NewModules:
    """Notices which modules of the recorded packages appear during a reload."""

    def __init__(self, prefixes: Sequence[str], records: Records) -> None:
        self._prefixes = prefixes
        self._records = records
        self._before: set[str] = set()

    def start(self) -> None:
        """Remember what is loaded now."""
        self._before = set(sys.modules)

    def log_into(self, log: UndoLog) -> None:
        """Log the modules that were loaded since `start`; modules of other packages stay loaded."""
        if not self._before:
            return
        fresh = [n for n in list(sys.modules) if n not in self._before and within(n, self._prefixes)]
        for name in fresh:
            self._before.add(name)
            record = self._records.modules.get(name)
            log.add(AddedEntry(sys.modules, name))
            parent, _, child = name.rpartition(".")
            holder = sys.modules.get(parent)
            if is_a(holder, ModuleType) and vars(holder).get(child) is sys.modules[name]:
                log.add(AddedEntry(vars(holder), child))
            if record is not None:
                log.add(_AddedRecord(self._records, record))


class _AddedRecord(Record):
    """What is known of a module, and its text in the line cache."""

    def __init__(self, records: Records, record: ModuleRecord) -> None:
        self._records = records
        self._record = record
        self._known = True

    def exchange(self) -> None:
        if self._known:
            self._records.forget(self._record.name)
        else:
            self._records.add(self._record)
        self._known = not self._known
