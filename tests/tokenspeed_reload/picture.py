"""A deep picture of a process by identity and content; two equal pictures say that an undo left no trace."""

from __future__ import annotations

import collections
import contextlib
import functools
import linecache
import sys
import types
from typing import Any

CACHE = type(functools.lru_cache(lambda: None))
FUNCTION_PARTS = ("__code__", "__defaults__", "__kwdefaults__", "__annotations__", "__doc__", "__name__")
FUNCTION_PARTS += ("__qualname__", "__module__", "__globals__", "__closure__", "__dict__")
if sys.version_info >= (3, 12):
    FUNCTION_PARTS += ("__type_params__",)
ATTRIBUTES: dict[type, tuple[str, ...]] = {
    types.FunctionType: FUNCTION_PARTS,
    types.MethodType: ("__func__", "__self__"),
    property: ("fget", "fset", "fdel", "__doc__"),
    staticmethod: ("__func__", "__dict__"),
    classmethod: ("__func__", "__dict__"),
    functools.partial: ("func", "args", "keywords", "__dict__"),
    CACHE: ("__dict__",),
}
ATOMS = (int, str, bytes, float, complex, bool, type(None), types.CodeType, types.BuiltinFunctionType)


def deep_picture(roots: dict[str, Any], modules: list[str]) -> list[Any]:
    """All that is reached from `roots` and `modules`, as a flat list; no method of an object is called."""
    tops = {m.split(".")[0] for m in modules}
    loaded = [n for n in sys.modules if n.split(".")[0] in tops]
    picture: list[Any] = [("loaded", [(n, id(sys.modules[n])) for n in loaded])]
    files = {vars(sys.modules[n]).get("__file__") for n in loaded}
    picture.append(("text", [(path, linecache.cache.get(path)) for path in sorted(filter(None, files))]))
    todo: list[Any] = [sys.modules[n] for n in loaded] + [v for k, v in roots.items() if k != "__builtins__"]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, ATOMS):
            continue
        seen.add(id(value))
        entry, inner = _look(value, tops)
        picture.append((id(value), type(value).__name__, entry))
        todo.extend(inner)
    return picture


def _is_ours(module: Any, tops: set[str]) -> bool:
    return isinstance(module, str) and module.split(".")[0] in tops


def _look(value: Any, tops: set[str]) -> tuple[Any, list[Any]]:
    """What is to be equal, and what to look at next."""
    kind = type(value)
    if isinstance(value, types.ModuleType):
        if not _is_ours(vars(value).get("__name__"), tops):
            return None, []
        members = [(k, v) for k, v in vars(value).items() if k != "__builtins__"]
        return _by_identity(members), [v for _, v in members]
    if kind in ATTRIBUTES:
        values = [getattr(value, name) for name in ATTRIBUTES[kind]]
        if kind is types.FunctionType and not _is_ours(value.__globals__.get("__name__"), tops):
            values[FUNCTION_PARTS.index("__globals__")] = None
        return [_shown(v) for v in values], [v for v in values if not isinstance(v, ATOMS)]
    if kind is types.CellType:
        try:
            return _shown(value.cell_contents), [value.cell_contents]
        except ValueError:
            return "empty", []
    if isinstance(value, type):
        if not _is_ours(type.__getattribute__(value, "__dict__").get("__module__"), tops):
            return None, []
        members = list(type.__getattribute__(value, "__dict__").items())
        bases = type.__getattribute__(value, "__bases__")
        derived = [id(cls) for cls in type.__subclasses__(value)]
        return [_by_identity(members), [id(b) for b in bases], derived, id(kind)], [*(v for _, v in members), *bases]
    entry: list[Any] = [id(kind)]
    inner: list[Any] = []
    if isinstance(value, dict):
        items = list(dict.items(value))
        entry.append([(_shown(k), _shown(v)) for k, v in items])
        inner += [part for item in items for part in item]
    elif isinstance(value, list | tuple | collections.deque):
        entry.append([_shown(v) for v in value])
        inner += list(value)
    elif isinstance(value, set | frozenset):
        entry.append(sorted(id(v) for v in value))
        inner += list(value)
    elif kind is types.MappingProxyType:
        entry.append([(_shown(k), _shown(v)) for k, v in value.items()])
        inner += list(value.values())
    if _is_ours(kind.__module__, tops) or kind.__module__ == "functools":
        state = _state(value)
        entry.append([(name, _shown(v)) for name, v in state])
        inner += [v for _, v in state]
    return entry, inner


def _by_identity(members: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(name, _shown(value)) for name, value in members if name not in ("__weakref__", "_abc_impl")]


def _shown(value: Any) -> Any:
    """Atoms by value, since reading some attributes builds them anew; all else by identity."""
    if isinstance(value, str | int | bytes | float | type(None)) and type(value).__module__ == "builtins":
        return (type(value).__name__, value)
    if type(value) is dict and not value:
        return "an empty dict"  # of a function without attributes, made when it is read
    return id(value)


def _state(value: Any) -> list[tuple[str, Any]]:
    """The attributes of an instance, in `__dict__` and in slots."""
    found: list[tuple[str, Any]] = []
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    found.append((name, member.__get__(value)))
                except AttributeError:
                    found.append((name, "unset"))
    with contextlib.suppress(AttributeError):
        found += list(object.__getattribute__(value, "__dict__").items())
    return found
