"""What is done to one module of a reload before its statements run, and after."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tokenspeed_reload.bindings import is_removed
from tokenspeed_reload.codes import CodeMap
from tokenspeed_reload.loader import SourceFinder, within
from tokenspeed_reload.merge import REMOVED, Merge
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.records import ModuleRecord, pin
from tokenspeed_reload.undo import ClassState, DictContents, FunctionState, LineCache
from tokenspeed_reload.values import home_told, is_a, module_name


class ModuleUpdate:
    """One module, and the state of the reload.

    Args:
        module: the module.
        record: what is known of its last run.
        namespace: its live namespace.
        merge: the state of the reload.
    """

    def __init__(self, module: ModuleInputs, record: ModuleRecord, namespace: dict[str, Any], merge: Merge) -> None:
        self._module = module
        self._record = record
        self._namespace = namespace
        self._merge = merge

    def show(self, code: CodeType) -> None:
        """Show the new text, and learn which code follows which; `code` is that of the new source."""
        self._merge.codes[self._record.source.path] = CodeMap(self._record.code, code)
        if code is self._record.code:
            return
        source = self._module.new.source
        for path in {self._record.source.path, source.path}:
            self._merge.log.add(LineCache(path))
        pin(source)

    def log_mutated(self, prefixes: Sequence[str]) -> None:
        """Statements such as `f.x = 1` write to objects that stay: log these before they run."""
        log = self._merge.log
        statements = (*self._module.statements(), *self._module.dropped)
        for name in sorted({name for s in statements for name in s.reads.mutates}):
            value: Any = self._namespace.get(name)
            if not is_a(value, ModuleType | FunctionType | type):
                continue
            home = module_name(value) if is_a(value, ModuleType) else home_told(value)
            if not isinstance(home, str) or not within(home, prefixes):
                continue
            if is_a(value, ModuleType):
                log.once(DictContents, vars(value))
            elif is_a(value, FunctionType):
                log.once(FunctionState, value)
            elif is_a(value, type):
                log.once(ClassState, value)

    def drop_attributes(self) -> None:
        """Take away what statements like `f.x = 1` set that are gone."""
        for name, attribute in sorted(self._module.lost):
            target: Any = self._namespace.get(name)
            is_own = is_a(target, FunctionType | type) and target.__module__ == self._module.name
            if is_own and attribute in vars(target):
                delattr(target, attribute)
                self._merge.touch(target)

    def set_file(self, finder: SourceFinder) -> None:
        """Let the module know its new file; it may have become a package, or be one no longer."""
        source, namespace = self._module.new.source, self._namespace
        if source.path == self._module.old.source.path or "__file__" not in namespace:
            return
        namespace["__file__"] = source.path
        if source.is_package == self._module.old.source.is_package:
            return
        spec = finder.spec_of(self._module.name, source, self._record.origin)
        if spec is not None:
            namespace |= {"__spec__": spec, "__loader__": spec.loader, "__package__": spec.parent}
            if spec.submodule_search_locations is not None:
                namespace["__path__"] = spec.submodule_search_locations
            else:
                namespace.pop("__path__", None)

    def definitions_due(self, old: dict[str, Any]) -> dict[str, Any]:
        """The definitions that run again, or are gone.

        What a module imports is not its own: the module that registered it need not run again.
        """
        statements = (*self._module.statements(), *self._module.dropped)
        again = sorted({name for s in statements for name in s.reads.binds} & old.keys())
        own = [n for n in again if home_told(old[n]) == self._module.name or not self._module.old.imports(n)]
        return {name: old[name] for name in own}

    def note_removed(self, old: dict[str, Any]) -> None:
        """Note the names that are gone, and what they stood for."""
        merge, module = self._merge, self._module
        gone = module.removed | (module.cleared - self._namespace.keys())
        for name in sorted(gone & old.keys()):
            merge.bindings += 1
            merge.rebound.add((id(self._namespace), name))
            if is_removed(old[name], module, name) and id(old[name]) not in merge.new_of:
                merge.replace(f"{module.name}.{name}", old[name], REMOVED)
