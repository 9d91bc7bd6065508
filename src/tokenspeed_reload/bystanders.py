"""Values in modules that a reload does not execute, and that were copied or computed from something that changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tokenspeed_reload.definitions import Definitions
from tokenspeed_reload.dependencies import Uses, import_edges
from tokenspeed_reload.inputs import Inputs
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.records import ModuleRecord
from tokenspeed_reload.report import Stale
from tokenspeed_reload.undo import MISSING
from tokenspeed_reload.values import is_atom, same_value

COPIED = "the value was copied by an import and the module that holds it was not executed again"
COMPUTED = "it was computed from {} and its module was not executed again"

Changed = Mapping[tuple[str, str], Any]
"""The names of modules whose value changed, each with the value of before; MISSING where that is no constant."""


class Bystanders:
    """The recorded modules that take no part in a reload.

    Args:
        records: what is known of all modules.
        uses: tells which of them use which.
        definitions: gives the statements of a module.
    """

    def __init__(
        self, records: Mapping[str, ModuleRecord], uses: Uses, definitions: Callable[[str], Definitions]
    ) -> None:
        self._records = records
        self._uses = uses
        self._definitions = definitions

    def stale(self, inputs: Inputs, changed: Changed, unused: Collection[str] = ()) -> list[Stale]:
        """Name what holds an old value.

        Args:
            inputs: the modules that take part.
            changed: their names that stand for another value.
            unused: names of modules that nothing needs.
        """
        if not changed:
            return []
        apart = {*inputs.modules, *unused}
        others = {n: r for n, r in self._records.items() if n not in apart and n in sys.modules}
        users, doubtful = self._uses.users({module for module, _ in changed}, others)
        modules = {name: self._module(name) for name in (*users, *doubtful)}
        # A module that may look up anything by a name would be taken to have computed all of its values so.
        plain = {name: module for name, module in modules.items() if not self._uses.finds_any(name, others[name])}
        return [*self._copied(modules, changed), *self._computed(plain, inputs, changed)]

    def _module(self, name: str) -> ModuleInputs:
        source = self._definitions(name)
        return ModuleInputs(name, source, source, vars(sys.modules[name]), is_doubtful=True)

    def _copied(self, modules: Mapping[str, ModuleInputs], changed: Changed) -> list[Stale]:
        copies: dict[tuple[str, str], list[str]] = {}
        for name, module in modules.items():
            for key, bound in _imported(module, changed):
                if changed[key] is not MISSING and same_value(module.namespace.get(bound, MISSING), changed[key]):
                    copies.setdefault(key, []).append(f"{name}.{bound}")
        return [Stale(f"{module}.{name}", COPIED, held_by) for (module, name), held_by in copies.items()]

    def _computed(self, modules: Mapping[str, ModuleInputs], inputs: Inputs, changed: Changed) -> list[Stale]:
        providers = {
            name: replace(module, dirty={n for home, n in changed if home == name})
            for name, module in inputs.modules.items()
        }
        view = Inputs({**providers, **modules})
        view.observe(modules.values())
        values = [inputs.modules[home].namespace.get(name) for home, name in changed]
        followed = {id(value) for value in values if not is_atom(value)}
        found: list[Stale] = []
        for name, module in modules.items():
            for value in sorted(module.dirty & module.value_names & module.namespace.keys()):
                if id(module.namespace[value]) not in followed:
                    why = COMPUTED.format(", ".join(view.sources_of(module, value)) or "what changed")
                    found.append(Stale(f"{name}.{value}", why, [f"{name}.{value}"]))
        return found


def _imported(module: ModuleInputs, changed: Changed) -> Iterator[tuple[tuple[str, str], str]]:
    """The changed names that a module imports, each with the name that it has there."""
    for edge in import_edges(module.name, module.new.source, [s.node for s in module.new.statements]):
        if edge.name == "*":
            yield from ((key, key[1]) for key in changed if key[0] == edge.module)
        elif edge.at_import and (edge.module, edge.name) in changed:
            yield (edge.module, edge.name or ""), edge.binds
