"""What a module does to the rest of the process when it runs: an undo does not take that back, so it is told."""

from __future__ import annotations

import ast
import atexit
import sys
import threading
from collections.abc import Container, Iterable
from types import FunctionType, ModuleType
from typing import Any

from tokenspeed_reload.dependencies import home_of
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.names import dotted
from tokenspeed_reload.report import Effect
from tokenspeed_reload.values import is_a, module_name

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
        self._foreign = {module_name(m): (m, dict(vars(m))) for m in self._foreign_modules()}

    def effects(self) -> list[Effect]:
        """What differs now, and which statements were run for an effect that cannot be seen."""
        found: list[str] = []
        found += [f"it started {t.name}, which goes on" for t in threading.enumerate() if t not in self._threads]
        if (added := _at_exit() - self._at_exit) > 0:
            found.append(f"it registered {added} function(s) with atexit")
        for name, (foreign, before) in self._foreign.items():
            found += [f"it set {name}.{attribute}" for attribute in _written(foreign, before)]
        for statement in self._module.statements():
            call = _bare_call(statement.node)
            if call is not None and self._is_foreign(call):
                line = statement.node.lineno
                found.append(f"line {line} ran for its effect outside of the recorded modules: {ast.unparse(call)}")
        return [Effect(self._module.name, what) for what in dict.fromkeys(found)]

    def _foreign_modules(self) -> Iterable[ModuleType]:
        values = list(self._module.namespace.values())
        return [v for v in values if is_a(v, ModuleType) and module_name(v) not in self._recorded]

    def _is_foreign(self, call: ast.Call) -> bool:
        node: ast.expr = call.func
        while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
            node = node.func if isinstance(node, ast.Call) else node.value
        name = dotted(node)
        if name is None or self._module.new.kinds_of(name) & {"function", "class"}:
            return False
        value = vars(sys.modules[self._module.name]).get(name)
        home = home_of(value) if is_a(value, ModuleType | FunctionType | type) else type(value).__module__
        return home is not None and home not in self._recorded and home not in _PLAIN


def _bare_call(node: ast.stmt) -> ast.Call | None:
    """The call that a statement makes for its effect alone, or None."""
    return node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None


def _written(module: ModuleType, before: dict[str, Any]) -> list[str]:
    """The attributes of a module that were set; what it loads by itself when it is asked does not count."""
    own = module_name(module).partition(".")[0]

    def is_lazy(value: Any) -> bool:
        home = home_of(value) if is_a(value, ModuleType | FunctionType | type) else None
        return home is not None and home.partition(".")[0] == own

    missing = object()
    return [
        name
        for name, value in list(vars(module).items())
        if before.get(name, missing) is not value and not (name not in before and is_lazy(value))
    ]


def _at_exit() -> int:
    return int(atexit._ncallbacks())
