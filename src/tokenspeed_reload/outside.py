"""What a module does to the rest of the process when it runs: an undo does not take that back, so it is told."""

from __future__ import annotations

import ast
import atexit
import sys
import threading
from collections.abc import Container
from types import FunctionType, ModuleType

from tokenspeed_reload.definitions import DEFINING
from tokenspeed_reload.dependencies import home_of
from tokenspeed_reload.foreign import Foreign, outer, target_of
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.names import dotted
from tokenspeed_reload.report import Effect
from tokenspeed_reload.values import is_a

_PLAIN = frozenset({"builtins", "collections"})


class Outside:
    """The state outside of the recorded modules before one of them runs.

    Args:
        module: the module that will run.
        recorded: names of the modules that an undo covers.
    """

    def __init__(self, module: ModuleInputs, recorded: Container[str]) -> None:
        self._module = module
        self._recorded = recorded
        self._threads = set(threading.enumerate())
        self._at_exit = _at_exit()
        self._foreign = Foreign(module, recorded)

    def effects(self) -> list[Effect]:
        """What differs now, and which statements were run for an effect that cannot be seen."""
        found: list[str] = []
        found += [f"it started {t.name}, which goes on" for t in threading.enumerate() if t not in self._threads]
        if (added := _at_exit() - self._at_exit) > 0:
            found.append(f"it registered {added} function(s) with atexit")
        calls = [call for s in self._module.statements() for call in _bare_calls(s.node) if self._is_foreign(call)]
        found += self._foreign.written(filter(None, map(_holder, calls)))
        found += [
            f"line {call.lineno} ran for its effect outside of the recorded modules: {ast.unparse(call)}"
            for call in calls
        ]
        return [Effect(self._module.name, what) for what in dict.fromkeys(found)]

    def _is_foreign(self, call: ast.Call) -> bool:
        node = target_of(call)
        while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
            node = node.func if isinstance(node, ast.Call) else node.value
        name = dotted(node)
        if name is None or self._module.new.kinds_of(name) & DEFINING:
            return False
        if self._foreign.is_root(name):
            return True
        value = vars(sys.modules[self._module.name]).get(name)
        home = home_of(value) if is_a(value, ModuleType | FunctionType | type) else type(value).__module__
        return home is not None and home not in self._recorded and home not in _PLAIN


def _bare_calls(node: ast.stmt) -> list[ast.Call]:
    """The calls that a statement makes for their effect alone, in whatever block they stand."""
    return [part.value for part in outer(node) if isinstance(part, ast.Expr) and isinstance(part.value, ast.Call)]


def _holder(call: ast.Call) -> str | None:
    """The dotted name of what a call acts upon."""
    target = target_of(call)
    return dotted(target.value if isinstance(target, ast.Attribute) and target is call.func else target)


def _at_exit() -> int:
    return int(atexit._ncallbacks())
