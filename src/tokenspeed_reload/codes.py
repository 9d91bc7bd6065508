"""Code objects: which new one follows an old one, and how it fits a live function."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from inspect import CO_OPTIMIZED
from types import CodeType, FunctionType
from typing import Any

from tokenspeed_reload.definitions import Definitions
from tokenspeed_reload.undo import set_code
from tokenspeed_reload.values import same_code

TARGET = "__reload_target__"
Path = tuple[str, ...]


class CodeMap:
    """Maps the code objects of a module's old version to those of its new one.

    Code objects are looked up by equality, which includes name, first line and bytecode, so that a function
    made by any execution of the same source is found.

    Attributes:
        removed: code of the old version that none of the new one follows.
        flags: the flags of the new version.
    """

    def __init__(self, old: CodeType, new: CodeType) -> None:
        self._follows: dict[CodeType, CodeType | None] = {}
        self._new = set(_all_of(new))
        self.flags = new.co_flags
        self.removed: list[CodeType] = []
        self._certain: set[CodeType] = set()
        self._follows[old] = new
        self._pair(old, new)

    def follower(self, code: CodeType) -> CodeType | None:
        """The new version of `code`, or None when it is not of the old module or was removed."""
        return self._follows.get(code)

    def is_new(self, code: CodeType) -> bool:
        """True for code of the new version; some code of the old version may be equal to it."""
        return code in self._new

    def is_replaced(self, code: CodeType) -> bool:
        """True for code of the old version that does something else in the new one, or is gone."""
        after = self._follows.get(code, code)
        return after is None or not same_code(code, after)

    def is_certain(self, code: CodeType) -> bool:
        """True when one old code object is known to be followed by `code`, as none of its name came or went."""
        return code in self._certain

    def __contains__(self, code: CodeType) -> bool:
        return code in self._follows

    def _pair(self, old: CodeType, new: CodeType) -> None:
        groups: defaultdict[tuple[str, bool], tuple[list[CodeType], list[CodeType]]] = defaultdict(lambda: ([], []))
        for side, parent in enumerate((old, new)):
            for code in nested(parent):
                is_function = bool(code.co_flags & CO_OPTIMIZED)  # unlike the body of a class of that name
                groups[code.co_name, is_function][side].append(code)
        for olds, news in groups.values():
            if len(olds) == len(news):
                self._certain.update(news)
            for before, after in _matched(olds, news):
                if after is None:
                    self.removed.append(before)
                    self._follows.setdefault(before, None)
                else:
                    self._follows[before] = after
                    self._pair(before, after)


def is_in_place(code: CodeType, wanted: CodeType) -> bool:
    """True when `code` is `wanted` in all, its file included, which equality of code leaves out."""
    return code == wanted and code.co_filename == wanted.co_filename


def _all_of(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in nested(code):
        yield from _all_of(inner)


def nested(code: CodeType) -> Iterator[CodeType]:
    """The code objects directly inside `code`."""
    return (const for const in code.co_consts if isinstance(const, CodeType))


def _matched(olds: list[CodeType], news: list[CodeType]) -> list[tuple[CodeType, CodeType | None]]:
    """Pair unchanged code first, then the rest in order of appearance."""
    pairs: list[tuple[CodeType, CodeType | None]] = []
    rest_old: list[CodeType] = []
    rest_new = list(news)
    for code in olds:
        equal = next((other for other in rest_new if same_code(code, other)), None)
        if equal is None:
            rest_old.append(code)
        else:
            rest_new.remove(equal)
            pairs.append((code, equal))
    for index, code in enumerate(rest_old):
        pairs.append((code, rest_new[index] if index < len(rest_new) else None))
    return pairs


def fit(code: CodeType, live: FunctionType, definitions: Definitions | None) -> CodeType | None:
    """A form of `code` that `live` can take with the cells that it has, or None.

    A function's cells cannot be changed in number. Cells that the new code no longer needs stay in it as
    unused nonlocal names.
    """
    have = live.__code__.co_freevars
    if code.co_freevars == have:
        return code
    surplus = set(have) - set(code.co_freevars)
    if definitions is None or len(surplus) + len(code.co_freevars) != len(have):
        return None
    if surplus & {*code.co_varnames, *code.co_cellvars}:
        return None
    node = _find(definitions, code)
    if node is None:
        return None
    imports = [s.node for s in definitions.statements if s.kind == "import"]
    return _padded(node, code, have, surplus, imports)


def _find(definitions: Definitions, code: CodeType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    for statement in definitions.statements:
        last = statement.node.end_lineno or statement.node.lineno
        if not statement.first_line <= code.co_firstlineno <= last:
            continue
        for node in ast.walk(statement.node):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if first == code.co_firstlineno:
                    return node
    return None


def _padded(
    node: ast.FunctionDef | ast.AsyncFunctionDef,
    code: CodeType,
    have: tuple[str, ...],
    surplus: set[str],
    imports: list[ast.stmt],
) -> CodeType | None:
    template = ast.parse(f"def factory():\n    {' = '.join(have)} = None\n    def inner(): pass")
    factory = template.body[0]
    assert isinstance(factory, ast.FunctionDef)
    body = [ast.Nonlocal(names=sorted(surplus)), *node.body]
    if ast.get_docstring(node, clean=False) is not None:
        body = [node.body[0], body[0], *node.body[1:]]
    fields = {name: getattr(node, name) for name in node._fields}
    copy = type(node)(**{**fields, "body": body, "decorator_list": []})
    ast.copy_location(copy, node)
    factory.body[-1] = copy
    template.body[:0] = never(imports)
    ast.fix_missing_locations(template)
    flags = code.co_flags & FUTURE_FLAGS
    module = compile(template, code.co_filename, "exec", flags=flags, dont_inherit=True)
    outer = next(c for c in nested(module) if c.co_name == "factory")
    inner = next((c for c in nested(outer) if c.co_name == code.co_name), None)
    if inner is None or inner.co_freevars != have or inner.co_names != code.co_names:
        return None
    return inner.replace(co_qualname=code.co_qualname, co_firstlineno=code.co_firstlineno)


ANNOTATIONS = 0x1000000  # annotations are texts
FUTURE_FLAGS = ANNOTATIONS | 0x800000  # and generator_stop; the others are always on


def never(statements: list[ast.stmt]) -> list[ast.stmt]:
    """A block that is compiled with the module and never runs."""
    if not statements:
        return []
    block = ast.If(test=ast.Constant(value=False), body=statements, orelse=[])
    return [ast.fix_missing_locations(ast.copy_location(block, statements[0]))]


def redirection(live: FunctionType) -> CodeType:
    """Code for `live` that calls the target in its keyword defaults with whatever it is given."""
    names = live.__code__.co_freevars
    lines = ["def factory():"]
    lines += [f"    {' = '.join(names)} = None"] if names else []
    lines += [f"    def redirect(*args, {TARGET}, **kwargs):"]
    lines += [f"        nonlocal {', '.join(names)}"] if names else []
    lines += [f"        return {TARGET}(*args, **kwargs)"]
    scope: dict[str, Any] = {}
    exec("\n".join(lines), scope)
    factory_code: CodeType = scope["factory"].__code__
    return next(nested(factory_code))


def redirect(function: FunctionType, target: Any) -> None:
    """Make `function` call `target`, a callable, and leave its names as they are."""
    set_code(function, redirection(function))
    function.__defaults__ = None
    function.__kwdefaults__ = {TARGET: target}
    function.__dict__["__wrapped__"] = target


def is_redirection(function: FunctionType) -> bool:
    """True when `function` was turned into a redirection."""
    return redirected_to(function) is not None


def redirected_to(function: FunctionType) -> Any | None:
    """What a redirection calls; None for any other function."""
    return (function.__kwdefaults__ or {}).get(TARGET)
