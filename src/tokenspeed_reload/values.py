"""Comparison of values without calling any user-defined method."""

from __future__ import annotations

from types import CodeType, EllipsisType, FunctionType, ModuleType, NoneType, NotImplementedType
from typing import Any

_ATOMS = frozenset({int, bool, str, bytes, NoneType, EllipsisType, NotImplementedType, range})
_NUMBERS = frozenset({float, complex})


def is_a(value: Any, kinds: Any) -> bool:
    """`isinstance` without asking the value: the `__class__` of a proxy may be anything, or raise."""
    return issubclass(type(value), kinds)


def has_method(value: Any, name: str) -> bool:
    """True when the class of a value has a method, told without asking the value or a metaclass."""
    return any(name in vars(base) for base in type(value).__mro__)


def is_atom(value: Any) -> bool:
    """True for immutable built-in values, whose identity does not matter."""
    kind = type(value)
    if kind in (tuple, frozenset):
        return all(is_atom(item) for item in value)
    return kind in _ATOMS or kind in _NUMBERS


def same_value(left: Any, right: Any) -> bool:
    """True for the same object, and for equal atoms of the same type."""
    if left is right:
        return True
    kind = type(left)
    if kind is not type(right):
        return False
    if kind in _ATOMS:
        return bool(left == right)
    if kind in _NUMBERS:
        return repr(left) == repr(right)  # tells 0.0 from -0.0, and knows nan
    if kind is tuple:
        return len(left) == len(right) and all(map(same_value, left, right))
    if kind is frozenset:
        return is_atom(left) and is_atom(right) and bool(left == right)
    return False


def module_name(module: ModuleType) -> str:
    """The name of a module, whatever its class says of it."""
    name = (attributes_of(module) or {}).get("__name__")
    return name if type(name) is str else ""


def home_told(value: Any) -> str | None:
    """The module that a function, a class, or an object with an attribute for it says it is defined in."""
    is_definition = is_a(value, FunctionType | type)
    home = value.__module__ if is_definition else (attributes_of(value) or {}).get("__module__")
    return home if type(home) is str else None


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of an instance, whatever its class says of it; None when it has none."""
    if issubclass(type(value), type):
        return None
    try:
        state = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return state if type(state) is dict else None


def same_dict(left: dict[str, Any] | None, right: dict[str, Any] | None) -> bool:
    """True when two dicts have the same keys in the same order, and the same values."""
    if left is None or right is None:
        return not left and not right
    return list(left) == list(right) and all(same_value(left[key], right[key]) for key in left)


def same_code(left: CodeType, right: CodeType) -> bool:
    """True when two code objects do the same, wherever they stand in the file."""
    return left is right or meaning_of(left) == meaning_of(right)


def meaning_of(code: CodeType) -> tuple[Any, ...]:
    """What code does, without its place in the file."""
    constants = tuple(
        ("code", meaning_of(c)) if isinstance(c, CodeType) else (type(c), repr(c)) for c in code.co_consts
    )
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_name)
    return (code.co_code, constants, counts, names, code.co_exceptiontable)
