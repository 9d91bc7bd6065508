"""The names of one module: which live object each keeps after the module was executed."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from types import FunctionType, ModuleType
from typing import Any

from tokenspeed_reload.inputs import ModuleInputs
from tokenspeed_reload.merge import Constant, Merge
from tokenspeed_reload.undo import MISSING, DictContents, ListContents, SetContents
from tokenspeed_reload.values import is_atom, same_value

_MAPPINGS = (dict, OrderedDict, defaultdict)
_CONTAINERS = (*_MAPPINGS, list, deque, set)


def bind(module: ModuleInputs, namespace: dict[str, Any], old: dict[str, Any], merge: Merge) -> None:
    """Merge what the statements bound into what the names held before."""
    names = [n for s in module.statements() for n in s.reads.binds if n in namespace]
    names += [n for n in namespace if n not in old]
    definitions = [n for n in names if _is_definition(module, n)]
    for name in dict.fromkeys([*definitions, *names]):
        value, held = namespace[name], old.get(name, MISSING)
        where = f"{module.name}.{name}"
        if held is MISSING:
            stays = merge.resolve(value)
        elif name in definitions:
            stays = _merge_definition(held, value, where, merge)
        else:
            stays = _merge_value(module, name, held, value, where, merge)
        _settle(module, namespace, name, held, stays, where, merge)


def _is_definition(module: ModuleInputs, name: str) -> bool:
    both = (module.old.kinds_of(name), module.new.kinds_of(name))
    return all(kinds & {"function", "class"} for kinds in both)


def _merge_definition(held: Any, value: Any, where: str, merge: Merge) -> Any:
    if not _is_ours(held, merge):
        return merge.resolve(value)  # someone put another object in its place
    stays = merge.merge_definition(held, value, where)
    known = any(entry.old is held for entry in merge.replaced)
    if stays is value and stays is not held and not known and not same_value(held, value):
        merge.replace(where, held, f"It became another kind of object: {type(value).__name__}.")
    return stays


def _is_ours(value: Any, merge: Merge, depth: int = 4) -> bool:
    """True when a definition made `value`, directly or inside of what decorators put around it."""
    if isinstance(value, type):
        return value.__module__ in merge.inputs.modules
    if type(value) is not FunctionType:
        return True
    if merge.is_old_code(value):
        return True
    inner = [value.__dict__.get("__wrapped__"), *(_contents(c) for c in value.__closure__ or ())]
    return depth > 0 and any(type(v) is FunctionType and _is_ours(v, merge, depth - 1) for v in inner)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _merge_value(module: ModuleInputs, name: str, held: Any, value: Any, where: str, merge: Merge) -> Any:
    resolved = merge.resolve(value)
    if resolved is not value:
        return resolved
    if _is_container_statement(module, name) and type(held) is type(value) and type(value) in _CONTAINERS:
        return merge_container(held, value, where, merge)
    if isinstance(value, FunctionType | type) or _wraps_function(value):
        return merge.merge(held, value, where)
    return value


def _wraps_function(value: Any) -> bool:
    return type(getattr(value, "__wrapped__", None)) is FunctionType or type(value).__module__ == "functools"


def _is_container_statement(module: ModuleInputs, name: str) -> bool:
    """True when both versions build the container right here, so that no one else owns it."""
    for definitions in (module.old, module.new):
        made = [s for s in definitions.statements if name in s.reads.binds]
        if not made or not all(s.is_container for s in made if s.kind == "value"):
            return False
        if any(s.kind != "value" for s in made):
            return False
    return True


def merge_container(live: Any, new: Any, where: str, merge: Merge) -> Any:
    """Give a live container the contents of a new one; functions and classes in it are updated in place."""
    if id(live) in merge.new_of:
        return new
    merge.follow(live, new)
    if isinstance(live, _MAPPINGS):
        for key, value in new.items():
            if is_atom(key) and key in live:
                new[key] = merge.merge(live[key], value, f"{where}[{key!r}]")
        if isinstance(live, defaultdict):
            live.default_factory = new.default_factory
        same = len(live) == len(new) and all(
            same_value(a, b) and same_value(c, d) for (a, c), (b, d) in zip(live.items(), new.items(), strict=True)
        )
        record: Any = DictContents
    elif isinstance(live, set):
        same = len(live) == len(new) and all(is_atom(item) for item in live | new) and live == new
        record = SetContents
    else:
        for index, (old, value) in enumerate(zip(list(live), list(new), strict=False)):
            new[index] = merge.merge(old, value, f"{where}[{index}]")
        same = len(live) == len(new) and all(map(same_value, live, new))
        record = ListContents
    if not same:
        merge.log.once(record, live)
        live.clear()
        live.extend(new) if isinstance(live, list | deque) else live.update(new)
        merge.touch(live, counts=bool(new))
    return live


def _settle(
    module: ModuleInputs,
    namespace: dict[str, Any],
    name: str,
    held: Any,
    stays: Any,
    where: str,
    merge: Merge,
) -> None:
    is_edited = is_atom(stays) or any(id(s) in module.added for s in module.new.statements if name in s.reads.binds)
    is_value = held is not MISSING and name in module.value_names and is_edited
    if same_value(held, stays):
        namespace[name] = held
        if is_value and id(held) in merge.patched:
            merge.new_values.append((module.name, name))
        return
    namespace[name] = stays
    if name.startswith("__") and name.endswith("__"):
        return
    merge.bindings += 1
    if is_value:
        merge.new_values.append((module.name, name))
    if held is not MISSING and is_atom(held):
        merge.constants[module.name, name] = Constant(held)
    built_here = name in module.value_names or _is_definition(module, name)
    known = any(entry.old is held for entry in merge.replaced)
    follows = held is MISSING or is_atom(held) or isinstance(held, ModuleType) or id(held) in merge.new_of
    if built_here and not known and not follows:
        merge.replace(where, held, "Its value was built anew.")
