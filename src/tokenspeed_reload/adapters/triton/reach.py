"""What a kernel compiles in: the globals it names, and through them other kernels, classes and constants."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from tokenspeed_reload.adapters.triton.library import Triton, is_tritons
from tokenspeed_reload.names import reads_of
from tokenspeed_reload.undo import MISSING, cell_value
from tokenspeed_reload.values import attributes_of, is_a, is_atom, module_name, same_value

_MAX_KNOWN = 10_000
_DEPTH = 3


@dataclass
class Reach:
    """What one kernel reaches by the names in its source, without what its callees reach.

    Attributes:
        bindings: the places of these names, as (id of a namespace, name).
        attributes: those of them that were reached through an attribute; Triton leaves their values out of the key.
        objects: the classes, functions and values found there.
        callees: the kernels, device and constexpr functions found there.
        values: the values of attributes that are neither of these, as (name, text).
    """

    bindings: set[tuple[int, str]] = field(default_factory=set)
    attributes: set[tuple[int, str]] = field(default_factory=set)
    objects: dict[int, Any] = field(default_factory=dict)
    callees: dict[int, Any] = field(default_factory=dict)
    values: list[tuple[str, str]] = field(default_factory=list)


class Reaches:
    """Finds what kernels reach; the names in a source are parsed once."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def of(self, kernel: Any, library: Triton) -> Reach:
        """What `kernel`, which has source of its own, reaches now."""
        reach = Reach()
        function = kernel.fn
        closure: dict[str, Any] = {}
        if type(function) is FunctionType:
            closure = {
                name: cell_value(cell)
                for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            }
        for read in self._reads(kernel):
            self._follow(read, closure, kernel.__globals__, reach, library)
        reach.callees.pop(id(kernel), None)
        return reach

    def _reads(self, kernel: Any) -> list[str]:
        known = self._names.get(kernel.src)
        if known is None:
            if len(self._names) > _MAX_KNOWN:
                self._names.clear()
            reads = reads_of(kernel.parse().body[0])
            known = self._names[kernel.src] = sorted(reads.now | reads.later)
        return known

    def _follow(
        self, read: str, closure: Mapping[str, Any], names: dict[str, Any], reach: Reach, library: Triton
    ) -> None:
        first, *rest = read.split(".")
        if first in closure:
            value = closure[first]
        else:
            reach.bindings.add((id(names), first))
            value = names.get(first, MISSING)
        _note(value, reach, library, _DEPTH)
        for name in rest:
            if value is MISSING or type(value) is FunctionType or library.is_kernel(value):
                return
            value = _attribute(value, name, reach)
            _note(value, reach, library, _DEPTH)
        home: Any = names.get(first)
        if rest and not (is_a(home, ModuleType) and is_tritons(module_name(home))):
            text = _text(value, library)
            if text is not None:
                reach.values.append((read, text))


def _attribute(value: Any, name: str, reach: Reach) -> Any:
    """An attribute, looked up without running code of the program."""
    if is_a(value, type):
        owners = [cls for cls in value.__mro__ if name in vars(cls)]
        return vars(owners[0])[name] if owners else MISSING
    namespace = attributes_of(value)
    if namespace is None:
        return MISSING
    reach.bindings.add((id(namespace), name))
    reach.attributes.add((id(namespace), name))
    return namespace.get(name, MISSING)


def _plain(value: Any, library: Triton) -> Any:
    return value.value if issubclass(type(value), library.constexpr) else value


def _text(value: Any, library: Triton) -> str | None:
    """A text that tells values from each other, for those that have one and are no code."""
    value = _plain(value, library)
    if is_atom(value) or is_tritons(type(value).__module__):
        return None if library.is_kernel(value) else repr(value)
    return None


def _note(value: Any, reach: Reach, library: Triton, depth: int) -> None:
    if value is MISSING or depth == 0 or is_atom(value):
        return
    if library.is_source(value):
        reach.callees[id(value)] = value
        return
    reach.objects[id(value)] = value
    if issubclass(type(value), library.constexpr):
        _note(value.value, reach, library, depth - 1)
    elif is_a(value, type):
        for member in vars(value).get("hash_attrs", ()):  # an aggregate lists the functions that it is made of
            _note(member, reach, library, depth - 1)
    elif type(value) in (tuple, list):
        for item in value:
            _note(item, reach, library, depth - 1)
    elif type(value) is dict:
        for item in value.values():
            _note(item, reach, library, depth - 1)


def callees_first(kernels: Mapping[int, Any], reaches: Mapping[int, Reach]) -> Iterator[Any]:
    """The kernels, each after those that it calls, so far as calls do not go in circles."""
    seen: set[int] = set()

    def visit(key: int) -> Iterator[Any]:
        if key in seen or key not in kernels:
            return
        seen.add(key)
        for callee in reaches[key].callees:
            yield from visit(callee)
        yield kernels[key]

    for key in kernels:
        yield from visit(key)


def differing_globals(kernel: Any) -> list[tuple[str, Any]]:
    """The globals that a kernel compiled in and that have another value now; Triton refuses to run it then."""
    found = []
    for (name, _), (value, namespace) in kernel.used_global_vals.items():
        now = namespace.get(name, MISSING)
        if not same_value(now, value) and not _is_equal(now, value):
            found.append((name, value))
    return found


def _is_equal(now: Any, value: Any) -> bool:
    """Compare as Triton does before every launch, where both are its own or built in: others may answer anything."""
    kinds = {type(now).__module__.partition(".")[0], type(value).__module__.partition(".")[0]}
    return kinds <= {"triton", "builtins"} and bool(now == value)


def key_of(kernel: Any, reach: Reach | None) -> str | None:
    """Compute the key of a kernel, together with the values of `reach` that Triton itself leaves out of it.

    Returns None when the kernel cannot compile as it is; what is wrong is told when it does.
    """
    try:
        key: str = kernel.cache_key
    except Exception:
        kernel.hash = None
        return None
    if reach is None:
        return key
    globals_ = ((name, value) for (name, _), (value, _) in kernel.used_global_vals.items())
    plain = [(name, repr(value)) for name, value in globals_ if type(value).__name__ != "constexpr"]
    hidden = [*reach.values, *plain]
    if hidden:
        key = kernel.hash = hashlib.sha256(f"{key}{hidden}".encode()).hexdigest()
    return key
