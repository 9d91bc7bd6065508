"""The names of one module: which live object each keeps after the module was executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import chain
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

from tokenspeed_reload.adapters.containers import CONTAINERS, merge_container
from tokenspeed_reload.codes import is_redirection
from tokenspeed_reload.definitions import DEFINING
from tokenspeed_reload.merge import Constant, Merge
from tokenspeed_reload.moduleinputs import ModuleInputs
from tokenspeed_reload.moves import Move
from tokenspeed_reload.undo import MISSING
from tokenspeed_reload.values import attributes_of, home_told, is_a, is_atom, same_value

LEFT = "the name stands for another object now; this one goes on where it came from"

_DERIVED = (dict, list, set)
_MAPPINGS = (dict, MappingProxyType)
_SETS = (set, frozenset)
_PLAIN = (*_MAPPINGS, list, *_SETS)


def bind(module: ModuleInputs, namespace: dict[str, Any], old: dict[str, Any], merge: Merge) -> None:
    """Merge what the statements bound into what the names held before."""
    names = [n for s in module.statements() for n in s.reads.binds if n in namespace]
    names += [n for n in sorted(module.cleared) if n in namespace]
    names += [n for n in namespace if n not in old]
    definitions = [n for n in names if _is_definition(module, n)]
    for name in dict.fromkeys([*definitions, *names]):
        value, held = namespace[name], old.get(name, MISSING)
        where = f"{module.name}.{name}"
        if held is MISSING:
            stays = merge.resolve(value)
        elif name in definitions:
            stays = _merge_definition(module, name, held, value, old, merge)
        elif not _is_alias(name, held, old) and (mover := Move(module, name, held, value, merge)).concerns:
            stays = mover.follow(where)
        else:
            stays = _merge_value(module, name, held, value, where, merge)
        _settle(module, namespace, name, held, stays, where, merge)


def _is_definition(module: ModuleInputs, name: str) -> bool:
    both = (module.old.kinds_of(name), module.new.kinds_of(name))
    return all(kinds & DEFINING for kinds in both)


def _merge_definition(module: ModuleInputs, name: str, held: Any, value: Any, old: dict[str, Any], merge: Merge) -> Any:
    where = f"{module.name}.{name}"
    if not merge.is_own(held, module) or _is_alias(name, held, old):
        return merge.resolve(value)  # another object stood in its place
    stays = merge.merge_definition(held, value, where)
    known = any(entry.old is held for entry in merge.replaced)
    if stays is value and stays is not held and not known and not same_value(held, value):
        merge.replace(where, held, f"it became another kind of object: {type(value).__name__}")
    return stays


def _is_alias(name: str, held: Any, old: dict[str, Any]) -> bool:
    """True when what the name held is another definition of the module, as after `name = other`."""
    own = held.__qualname__ if is_a(held, FunctionType | type) else name
    return own != name and old.get(own) is held


def _merge_value(module: ModuleInputs, name: str, held: Any, value: Any, where: str, merge: Merge) -> Any:
    resolved = merge.resolve(value)
    if resolved is not value:
        return resolved
    if is_container_statement(module, name) and type(held) is type(value) and type(value) in CONTAINERS:
        return merge_container(held, value, where, merge)
    if follows_in_place(value, merge):
        return merge.merge(held, value, where)
    if type(value) is tuple and type(held) is tuple and len(value) == len(held):
        pairs = enumerate(zip(held, value, strict=True))
        items = tuple(merge.merge(old, new, f"{where}[{i}]") for i, (old, new) in pairs)
        return held if all(map(same_value, items, held)) else items
    if id(value) in merge.young and id(held) not in merge.new_of and _is_alike(held, value, merge):
        merge.follow(held, value)
        return held
    return value


def _is_alike(held: Any, value: Any, merge: Merge) -> bool:
    """True for a container that was built anew and holds what it held, in the same order if it has one."""
    if type(value) not in _PLAIN or type(held) is not type(value) or len(held) != len(value):
        return False
    if type(value) in _SETS:
        return set(map(_identity, held)) == {_identity(merge.resolve(item)) for item in value}
    before, now = (_parts(container) for container in (held, value))
    return all(same_value(part, merge.resolve(other)) for part, other in zip(before, now, strict=True))


def _identity(item: Any) -> Any:
    return (type(item), repr(item)) if is_atom(item) else id(item)


def _parts(container: Any) -> Iterator[Any]:
    return chain.from_iterable(container.items()) if type(container) in _MAPPINGS else iter(container)


def follows_in_place(value: Any, merge: Merge) -> bool:
    """True for values that stand for a definition, or that the program's own classes make: a live one is updated."""
    is_merged = is_a(value, FunctionType | type) or _wraps_function(value) or _is_wrapped(value, merge)
    return is_merged or _is_own_instance(value, merge)


def _is_own_instance(value: Any, merge: Merge) -> bool:
    """True for an instance of a class that only recorded modules define, a container that it derives from apart."""
    bases = [base for base in type(value).__mro__[:-1] if not any(base is kind for kind in _DERIVED)]
    return bool(bases) and all(base.__module__ in merge.recorded for base in bases)


def _is_wrapped(value: Any, merge: Merge) -> bool:
    return any(library.wraps(value) for library in merge.libraries)


def _wraps_function(value: Any) -> bool:
    inner = (attributes_of(value) or {}).get("__wrapped__")
    return type(inner) is FunctionType or type(value).__module__ == "functools"


def is_container_statement(module: ModuleInputs, name: str) -> bool:
    """True when both versions build the container right here, so that no one else owns it."""
    for definitions in (module.old, module.new):
        made = [s for s in definitions.statements if name in s.reads.binds]
        if not made or not made[0].is_container:
            return False
        if not all(s.is_container or isinstance(s.node, ast.AugAssign) for s in made):
            return False
    return True


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
    merge.rebound.add((id(namespace), name))
    if is_value:
        merge.new_values.append((module.name, name))
    if held is not MISSING and is_atom(held):
        merge.constants[module.name, name] = Constant(held)
    if held is not MISSING and not is_atom(held):
        _note_left(module, name, held, merge)


def _note_left(module: ModuleInputs, name: str, held: Any, merge: Merge) -> None:
    """Note an object that a name no longer stands for, unless it follows: whoever has it holds on to it."""
    where = f"{module.name}.{name}"
    is_redirected = type(held) is FunctionType and is_redirection(held) and id(held) in merge.touched
    if is_redirected or any(entry.old is held and not entry.goes_on for entry in merge.replaced):
        return
    if is_left_elsewhere(module, name, held):
        merge.replace(where, held, LEFT, goes_on=True)
    elif id(held) not in merge.new_of:
        merge.replace(where, held, "its value was built anew")


def is_removed(value: Any, module: ModuleInputs, name: str) -> bool:
    """True for what a name that is gone stood for, if it was made there: nothing stands for it any more."""
    if is_atom(value) or is_a(value, ModuleType):
        return False
    if is_a(value, FunctionType | type):
        return bool(value.__module__ == module.name)
    # A decorator may have made another kind of object of a definition, such as a kernel.
    return bool(module.old.kinds_of(name) - {"import"}) and not module.old.imports(name)


def is_left_elsewhere(module: ModuleInputs, name: str, held: Any) -> bool:
    """True for an object that came from somewhere else and goes on there: an import, or another name for it."""
    if is_a(held, ModuleType) or not module.old.kinds_of(name) - {"import"}:
        return True
    if module.old.imports(name) and home_told(held) != module.name:
        return True
    is_definition = is_a(held, FunctionType | type)
    return (
        is_definition and (held.__module__, held.__qualname__) != (module.name, name) and "<" not in held.__qualname__
    )
