"""CuTe DSL: functions whose code the DSL rewrites on their first trace, and what it compiled of them.

`@cute.jit` and `@cute.kernel` give a plain wrapper around a function. On the first trace the DSL puts rewritten code
into that function, and keeps the code of before as an attribute.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tokenspeed_reload.adapters.functions import FunctionAdapter
from tokenspeed_reload.codes import fit, is_in_place, nested
from tokenspeed_reload.merge import Merge
from tokenspeed_reload.undo import FunctionState, cell_value, set_code
from tokenspeed_reload.values import is_a, same_code

_ORIGINAL = "_original_code"
_OF_A_TRACE = (_ORIGINAL, "_preprocessed", "_preprocessed_signature", "__pyir_rewritten__")
_SETTINGS = ("_cute_dsl_name_options", "__pyir_native__")
_WHY = "It was compiled from code that changed; compile it again, or keep it in a container that the module makes."


class CuteAdapter:
    """Updates functions that CuTe DSL traces, and names compiled ones that are kept elsewhere."""

    def matches(self, live: Any, new: Any, merge: Merge) -> bool:
        """True for the functions inside of two decorated ones of one definition."""
        return _is_traced(live) and _is_traced(new) and merge.same_definition(live, new)

    def merge(self, live: FunctionType, new: FunctionType, where: str, merge: Merge) -> Any:
        """Update `live`; the DSL rewrites it anew when it is traced next."""
        state = vars(live)
        original, rewritten = state.get(_ORIGINAL), live.__code__
        if original is not None:
            merge.log.once(FunctionState, live)
            set_code(live, original)
        stays = FunctionAdapter().merge(live, new, where, merge)
        if original is not None and id(live) not in merge.patched and is_in_place(live.__code__, original):
            set_code(live, rewritten)
            return stays
        gone = [name for name in _SETTINGS if name in state and name not in vars(new)]
        if id(live) in merge.touched or gone:
            _forget_trace(live, gone, merge)
        return stays

    def wraps(self, value: Any) -> bool:
        """True for decorated functions, whose code may be the DSL's own by now."""
        return type(value) is FunctionType and "_decorator_location" in vars(value)

    def begin(self, merge: Merge) -> None:
        """Nothing is to be known of before."""

    def kinds(self) -> set[type]:
        """Functions, and what the DSL compiles."""
        compiled = _compiled_class()
        return {FunctionType, *_with_subclasses(compiled)} if compiled is not None else set()

    def finish(self, objects: list[Any], merge: Merge) -> None:
        """Bring functions up to date that were made at run time or moved, and name compiled ones that are stale."""
        functions = [o for o in objects if type(o) is FunctionType and _is_traced(o)]
        for function in functions:
            self._update(function, merge)
        compiled = [o for o in objects if type(o) is not FunctionType]
        if compiled:
            self._note_compiled(compiled, functions, merge)

    def _update(self, function: FunctionType, merge: Merge) -> None:
        original = vars(function).get(_ORIGINAL)
        after = merge.follower(original) if original is not None else None
        if original is None or after is None or is_in_place(original, after):
            return
        fitted = fit(after, function, merge.definitions_for(after))
        where = f"{function.__module__}.{function.__qualname__}"
        if fitted is None:
            merge.replace(where, function, "Its closure needs values that only a new call of its maker gives.")
            return
        merge.note_padding(fitted, after)
        merge.log.once(FunctionState, function)
        set_code(function, fitted)
        _forget_trace(function, [], merge)
        merge.touch(function, counts=not same_code(original, fitted))

    def _note_compiled(self, compiled: list[Any], functions: list[FunctionType], merge: Merge) -> None:
        """Compiled functions know the name of what they were made of, but not the function itself."""
        stale = {f.__name__ for f in functions if any(id(g) in merge.patched for g in _reached(f))}
        kept = {f.__name__ for f in functions} - stale
        for value in compiled:
            name = str(getattr(value, "function_name", ""))
            if any(part in name for part in stale) and not any(part in name and len(part) > 3 for part in kept - stale):
                merge.replace(name, value, _WHY)


def _is_traced(value: Any) -> bool:
    """True for the function that the DSL's decorators wrap, not for the wrapper."""
    return type(value) is FunctionType and "_decorator_location" in vars(value) and "__wrapped__" not in vars(value)


def _forget_trace(function: FunctionType, settings: list[str], merge: Merge) -> None:
    merge.log.once(FunctionState, function)
    for name in (*_OF_A_TRACE, *settings):
        vars(function).pop(name, None)
    if vars(function).get("_preprocess_enabled") is False:
        vars(function)["_preprocessed"] = True


def _compiled_class() -> type | None:
    module = sys.modules.get("cutlass.base_dsl.jit_executor")
    found = getattr(module, "JitCompiledFunction", None)
    return found if is_a(found, type) else None


def _with_subclasses(cls: type) -> Iterator[type]:
    yield cls
    subclasses: list[type] = type.__subclasses__(cls)
    for below in subclasses:
        yield from _with_subclasses(below)


def _reached(function: FunctionType) -> Iterator[FunctionType]:
    """The functions that a trace of `function` may run, told by the names in their code."""
    seen: set[int] = set()
    todo: list[Any] = [function]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_a(value, type):
            todo.extend(vars(value).values())
        elif is_a(value, staticmethod | classmethod):
            todo.append(value.__func__)
        elif type(value) is FunctionType and not value.__module__.startswith("cutlass"):
            yield value
            todo.extend(_named(value))
        elif type(value) is FunctionType:
            todo.extend(item for item in map(cell_value, value.__closure__ or ()) if type(item) is FunctionType)


def _named(function: FunctionType) -> Iterator[Any]:
    code = vars(function).get(_ORIGINAL, function.__code__)
    names = set(_names(code))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        yield value
        if is_a(value, ModuleType):
            yield from (vars(value)[n] for n in names & vars(value).keys() if is_a(vars(value)[n], FunctionType))
    yield from map(cell_value, function.__closure__ or ())
    if "__wrapped__" in vars(function):
        yield vars(function)["__wrapped__"]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in nested(code):
        yield from _names(inner)
