"""PyTorch: operators of `torch.library` follow without a second registration; nothing that was compiled is stale."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable
from types import FunctionType
from typing import Any

from tokenspeed_reload.adapters.torch.operators import Operators, is_library, is_operator, operators_of, register_added
from tokenspeed_reload.merge import Merge
from tokenspeed_reload.undo import MISSING, DictContents, InstanceState, Record
from tokenspeed_reload.values import same_value

_REGISTRATION = frozenset(
    {"_lib", "_opoverload", "_namespace", "_name", "_schema", "_tags", "_is_inplace", "_is_out", "_out_kwarg_names"}
    | {"_disabled_kernel"}
)
_SCRIPTED = frozenset({"ScriptFunction", "ScriptModule", "RecursiveScriptModule"})
_OTHER_SCHEMA = "The schema of the operator changed; a registered operator keeps the one it has, and what it runs."


class TorchAdapter:
    """Updates operators that modules define, and drops what torch.compile made of the old code."""

    def matches(self, live: Any, new: Any, merge: Merge) -> bool:
        """True for two operators of one name, and for two library objects that share their state."""
        if is_library(live) and is_library(new):
            return vars(live) is vars(new)
        return is_operator(live) and is_operator(new) and live._qualname == new._qualname

    def merge(self, live: Any, new: Any, where: str, merge: Merge) -> Any:
        """Let `live` run what `new` would, if both have the same schema."""
        merge.follow(live, new)
        if is_library(live):
            return live
        if live._schema != new._schema or list(live._tags) != list(new._tags):
            self._leave(live, new, where, merge)
            return live
        state = dict(vars(live))
        for name, value in vars(new).items():
            if name not in _REGISTRATION:
                state[name] = self._part(live, vars(live).get(name, MISSING), value, f"{where}.{name}", merge)
        if any(not same_value(vars(live).get(name, MISSING), value) for name, value in state.items()):
            merge.log.once(InstanceState, live)
            added = register_added(live, state)
            vars(live).update(state)
            merge.touch(live)
            for what in added:
                home = where.rpartition(".")[0]
                merge.effect(home, f"It registered {live._qualname} for {what}, which stays registered.")
        return live

    def wraps(self, value: Any) -> bool:
        """True for operators and libraries, so that `NAME = custom_op(...)(f)` is merged too."""
        return is_operator(value) or is_library(value)

    def begin(self, merge: Merge) -> None:
        """Stand between the modules and the registration of operators."""
        if "torch" not in sys.modules:
            return
        if any(module.run or module.removed for module in merge.inputs.modules.values()):
            forget_compiled(merge.inputs.modules)
        merge.log.add(CompiledCode(merge.inputs.modules))
        for operator in operators_of():
            merge.log.once(InstanceState, operator)
            for value in vars(operator).values():
                if type(value) is dict:
                    merge.log.once(DictContents, value)
        operators = merge.kept[self] = Operators(merge)
        merge.log.add(operators)
        operators.stand_between()

    def kinds(self) -> set[type]:
        """Nothing of the heap is needed."""
        return set()

    def finish(self, objects: list[Any], merge: Merge) -> None:
        """Let operators register as usual again."""
        operators: Operators | None = merge.kept.pop(self, None)
        if operators is not None:
            operators.step_aside()
            merge.log.add(CompiledCode(merge.inputs.modules))
            _note_scripted(merge)

    def _part(self, live: Any, old: Any, new: Any, where: str, merge: Merge) -> Any:
        if type(new) is dict and type(old) is dict:
            merged = {key: self._part(live, old.get(key, MISSING), item, where, merge) for key, item in new.items()}
            kept = {k: v for k, v in old.items() if k not in merged and not _is_of_reload(v, merge)}
            merged = {**kept, **merged}
            same = list(old) == list(merged) and all(same_value(old[k], merged[k]) for k in old)
            return old if same else merged
        if new is None and type(old) is FunctionType and not _is_of_reload(old, merge):
            return old  # another module registered it
        if old is MISSING or old is None:
            return merge.resolve(new)
        if type(new) is FunctionType:
            merge.forced.add((id(old), id(new)))
        return merge.merge(old, new, where)

    def _leave(self, live: Any, new: Any, where: str, merge: Merge) -> None:
        """Keep an operator as it is; its functions, too, stay what they were."""
        merge.restart(where, _OTHER_SCHEMA)
        todo = [*vars(live).values()]
        while todo:
            value = todo.pop()
            if type(value) is dict:
                todo.extend(value.values())
            elif type(value) is FunctionType and id(value) not in merge.pinned:
                merge.pinned[id(value)] = value
                todo.extend(cell.cell_contents for cell in value.__closure__ or () if cell != type(cell)())


class CompiledCode(Record):
    """What torch.compile made: it inlines methods without a guard, so that it is dropped whenever code changes.

    It leaves names in the modules that it compiled, and takes them back when it is dropped. That has to come before
    module namespaces are exchanged, so that the record stands at both ends of the log.
    """

    def __init__(self, modules: Iterable[str]) -> None:
        self._modules = frozenset(modules)

    def exchange(self) -> None:
        forget_compiled(self._modules)


def forget_compiled(modules: Container[str]) -> None:
    """Let torch.compile start over, and TorchScript with the functions of `modules`; all compile when next needed."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and hasattr(dynamo, "reset"):
        dynamo.reset()
    scripted = getattr(sys.modules.get("torch.jit._state"), "_jit_caching_layer", {})
    for function in [f for f in scripted if getattr(f, "__module__", None) in modules]:
        del scripted[function]


def _note_scripted(merge: Merge) -> None:
    """Name what TorchScript compiled from functions that changed, unless its own definition ran again."""
    for module in merge.inputs.modules.values():
        again = {name for statement in module.statements() for name in statement.reads.binds}
        for name in sorted(module.dirty - again):
            value = module.namespace.get(name)
            if type(value).__name__ in _SCRIPTED and type(value).__module__.partition(".")[0] == "torch":
                why = "TorchScript compiled it from the old code of what it calls."
                merge.replace(f"{module.name}.{name}", value, why, is_held=True)


def _is_of_reload(value: Any, merge: Merge) -> bool:
    """True for a function that a module of the reload defines, also inside of what torch puts around it."""
    if type(value) is not FunctionType:
        return False
    inner = [cell.cell_contents for cell in value.__closure__ or () if cell != type(cell)()]
    functions = [value, *(item for item in inner if type(item) is FunctionType)]
    return any(f.__globals__.get("__name__") in merge.inputs.modules for f in functions)
