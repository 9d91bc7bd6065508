"""Whether a reload changed nothing but the bodies of functions and kernels, told from all that it wrote.

Every write is in the undo log with the state before it, and so is every kind of place that running a module may
have written to. What is found there as it was is no change, wherever it stands in the file; what this page does not
know is one.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from types import CodeType, FunctionType, MappingProxyType
from typing import Any

from tokenspeed_reload.adapters.torch import CompiledCode
from tokenspeed_reload.adapters.torch.operators import Operators
from tokenspeed_reload.adapters.triton.library import is_rewritten
from tokenspeed_reload.adapters.triton.states import KernelStates, Redone, Undone
from tokenspeed_reload.report import Bodies, ChangedKernel, kernel_name
from tokenspeed_reload.undo import (
    MISSING,
    AbstractCaches,
    CacheClear,
    Cell,
    ClassState,
    DictContents,
    Entry,
    FunctionCode,
    FunctionState,
    InstanceClass,
    InstanceState,
    LineCache,
    ListContents,
    NamedValues,
    ParticipantState,
    Record,
    SetContents,
    cell_value,
    elements_of,
    items_of,
)
from tokenspeed_reload.values import attributes_of, is_a, same_code, same_value

_MODULE_FACTS = frozenset({"__file__", "__builtins__", "__annotations__", "__doc__", "__cached__", "__loader__"})
"""Names in a module that say where its source is."""


def bodies_of(log: Iterable[Record], aside: Collection[int]) -> Bodies:
    """Read the log of a reload that is in force.

    Args:
        log: of all its writes.
        aside: identities of dicts that do not count: attributes of new objects that live ones took over, and of those
            that change by themselves.
    """
    found = Bodies()
    functions: dict[int, FunctionType] = {}
    for record in log:
        if isinstance(record, Undone):
            _kernels(record.states, found)
        elif not (isinstance(record, NamedValues | DictContents) and id(record.target) in aside):
            found.beyond.extend(_beyond(record, functions))
    inside = {id(changed.kernel.fn) for changed in found.kernels if not _is_visible(changed.kernel.fn)}
    found.functions = _live([function for key, function in functions.items() if key not in inside])
    found.beyond = list(dict.fromkeys(found.beyond))
    return found


def _live(functions: list[FunctionType]) -> list[FunctionType]:
    """The functions, without copies in other namespaces of those that live in their module."""

    def is_live(function: FunctionType) -> bool:
        module = sys.modules.get(function.__module__)
        return module is not None and vars(module) is function.__globals__

    live = {(f.__module__, f.__qualname__) for f in functions if is_live(f)}
    return [f for f in functions if is_live(f) or (f.__module__, f.__qualname__) not in live]


def _is_visible(function: Any) -> bool:
    """True for the function of a kernel that the program can call as well, as after `kernel = jit(function)`."""
    names = function.__globals__
    return any(value is function for value in names.values()) or bool(function.__closure__)


def _kernels(states: KernelStates, found: Bodies) -> None:
    for kernel, before, why in states.differences():
        if why:
            found.beyond.append(f"{kernel_name(kernel)} has {why}")
        elif before is not None:
            found.kernels.append(ChangedKernel(kernel, before))


def _beyond(record: Record, functions: dict[int, FunctionType]) -> Iterator[str]:
    """What one write changed but for bodies, which go to `functions`."""
    match record:
        case LineCache() | AbstractCaches() | CompiledCode() | Redone():
            return
        case FunctionCode(target=target, held=held):
            yield from _code(target, held, functions)
        case FunctionState(target=target, held=(parts, attributes)):
            yield from _code(target, parts[0], functions)
            now = record.read()
            if not (all(map(alike, parts[1:], now[0][1:])) and alike(dict(attributes), dict(now[1]))):
                yield f"{_name(target)} takes or holds something else"
        case DictContents(target=target, held=held):
            yield from _dict(target, held)
        case NamedValues(target=target, held=held):
            if not alike(held, record.read()):
                yield f"values in {target.get('__name__', 'a dict')} are others"
        case Entry(target=target, key=key, held=held):
            if not is_rewritten(target) and not alike(held, target.get(key, MISSING)):
                yield f"{key!r} has another value" if type(key) is str else "a dict has another content"
        case ClassState(target=target, held=held):
            if not alike(held, record.read()):
                yield f"{_name(target)} has other members"
        case ListContents(target=target, held=held):
            if not alike(held, elements_of(target)):
                yield "a list has another content"
        case SetContents(target=target, held=held):
            if {id(item) for item in held} != {id(item) for item in elements_of(target)}:
                yield "a set has another content"
        case InstanceState(target=target, held=held):
            if not alike(dict(held), attributes_of(target)):
                yield f"an object of the class {type(target).__name__} has other attributes"
        case InstanceClass(target=target, held=held):
            if type(target) is not held:
                yield f"an object is of the class {type(target).__name__} now"
        case Cell(target=target, held=held):
            if not alike(held, cell_value(target)):
                yield "a closure holds something else"
        case ParticipantState(target=target, held=held):
            if not alike(held, target.snapshot()):
                yield f"what {type(target).__name__} keeps of the modules is different"
        case CacheClear():
            if record.had_entries:
                yield f"the cache of {_name(record.target)} was emptied"
        case Operators():
            if record.added:
                yield "an operator was registered"
        case _:
            yield f"more than code changed ({type(record).__name__})"


def _code(function: FunctionType, before: CodeType, functions: dict[int, FunctionType]) -> Iterator[str]:
    now = function.__code__
    if same_code(before, now):
        return
    if _interface(before) != _interface(now):
        yield f"{_name(function)} takes or holds something else"
    functions[id(function)] = function


def _interface(code: CodeType) -> tuple[Any, ...]:
    """What callers and closures see of code."""
    count = code.co_argcount + code.co_kwonlyargcount
    return (
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        code.co_varnames[:count],
        code.co_freevars,
    )


def _dict(target: dict[Any, Any], held: list[tuple[Any, Any]]) -> Iterator[str]:
    now, before = items_of(target), held
    if "__spec__" in target and "__name__" in target:
        now, before = (dict(i for i in items if i[0] not in _MODULE_FACTS) for items in (now, held))  # type: ignore[assignment]
        for name in dict.fromkeys([*before, *now]):
            if name not in before or name not in now or not alike(before[name], now[name]):  # type: ignore[call-overload]
                yield f"{target['__name__']}.{name} has another value"
    elif not alike(before, now):
        yield "a dict has another content"


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"


def alike(left: Any, right: Any) -> bool:
    """True for the same objects, in containers that may be others; no method of the program is called."""
    if same_value(left, right):
        return True
    kind = type(left)
    if kind is not type(right):
        return False
    if kind in (tuple, list):
        return len(left) == len(right) and all(map(alike, left, right))
    if is_a(left, MappingProxyType):
        return alike(dict(left), dict(right))
    if kind is dict:
        return list(left) == list(right) and all(alike(left[key], right[key]) for key in left)
    return False
