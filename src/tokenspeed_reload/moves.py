"""Definitions that moved from one module to another; a module that imports the name on either side tells of it."""

from __future__ import annotations

import gc
from types import FunctionType
from typing import Any

from tokenspeed_reload.adapters.classes import give_way
from tokenspeed_reload.codes import TARGET, redirected_to
from tokenspeed_reload.definitions import DEFINING
from tokenspeed_reload.merge import Edit, Merge
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.values import is_a

MOVED = "it moved to another module; the class there takes its place"


class Move:
    """A name of a module that stood for a definition, and now stands for that of another module, or the other way.

    Args:
        module: the module.
        name: the name in it.
        held: the function or class that it stood for.
        value: what it stands for now.
        merge: the state of the reload.
    """

    def __init__(self, module: ModuleInputs, name: str, held: Any, value: Any, merge: Merge) -> None:
        self._module = module
        self._name = name
        self._held = held
        self._value = value
        self._merge = merge

    @property
    def concerns(self) -> bool:
        """True where the name stands for something of another module now, or no longer does."""
        module, name, held = self._module, self._name, self._held
        if held is self._value or id(held) in self._merge.new_of or not is_a(held, FunctionType | type):
            return False
        return (self._went and self._merge.is_own(held, module)) or module.old.imports(name)

    def follow(self, where: str) -> Any:
        """Let those who hold what the name gave before go on to what it gives now, and return that.

        An imported definition that is still where it came from is left alone: others have it from there.
        """
        went = self._went
        former = None if went else self._moved_before()
        stays = self._merge.resolve(self._value)
        if former is not None:
            stays = self._merge.merge_definition(former, self._value, where)
        if went or self._is_left():
            self._move(stays, where)
        return stays

    @property
    def _went(self) -> bool:
        kinds = self._module.old.kinds_of(self._name)
        return bool(kinds) and kinds <= DEFINING and self._module.new.imports(self._name)

    def _move(self, target: Any, where: str) -> None:
        """A class that was there before is not the old one at another place: no object becomes one of it."""
        held, merge = self._held, self._merge
        merge.left |= {held.__module__}.intersection(merge.gone)
        if type(held) is FunctionType and is_a(target, FunctionType) and not _calls(target, held):
            merge.redirect(held, target)
            merge.edited.append(Edit(where, held))
            merge.replaced[:] = [entry for entry in merge.replaced if entry.old is not held]
        elif is_a(held, type) and is_a(target, type) and id(target) in merge.young:
            give_way(held, target, where, MOVED, merge)

    def _moved_before(self) -> FunctionType | None:
        """The function that the module itself defined before, if it was redirected to the imported one."""
        if type(self._held) is not FunctionType or not self._module.new.kinds_of(self._name) <= DEFINING:
            return None
        for keywords in gc.get_referrers(self._held):
            if type(keywords) is not dict or keywords.get(TARGET) is not self._held:
                continue
            for function in gc.get_referrers(keywords):
                is_own = type(function) is FunctionType and function.__globals__ is self._module.namespace
                if is_own and redirected_to(function) is self._held and function.__qualname__ == self._name:
                    return function
        return None

    def _is_left(self) -> bool:
        """True when the module of the imported definition no longer has it."""
        home = self._merge.inputs.modules.get(self._held.__module__)
        is_bound = home is None or self._held.__qualname__ in home.new.binds
        return self._held.__module__ in self._merge.gone or not is_bound


def _calls(function: FunctionType, target: FunctionType) -> bool:
    """True for a redirection to `target`, over others or not."""
    called: Any = function
    while type(called) is FunctionType and called is not target:
        called = redirected_to(called)
    return called is target
