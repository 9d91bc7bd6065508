"""Reads that go by a text: modules found by their name, attributes of them by theirs.

`spell` turns such an expression into a dotted read like any other. Its first part names a module where no variable
does: `:pkg:k` is the module pkg.k, `::k` is k beside the module that reads, `:*` any module. `*` stands for all names
of the module that reads, `?` for those of the scope. `:__name__` is that module itself, `:__package__` its package.
"""

from __future__ import annotations

import ast
import re

ANY_MODULE = ":*"
OWN_NAMES = "*"
SCOPE_NAMES = "?"

_IMPORTERS = frozenset({"__import__", "import_module"})
_NAMESPACE = "__dict__"
_GETTERS = frozenset({"__getattribute__", "__getattr__"})
_ITEM_GETTERS = frozenset({"get", "__getitem__"})
_WRITERS = frozenset({"update", "setdefault", "pop", "clear", "__setitem__", "__delitem__"})
_SELF = frozenset({"__name__", "__package__"})

MODULE_PATH = re.compile(r"\.*[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d][\w.]*)?")
_QUOTED = re.compile(r"""["'](\.*[^\W\d]\w*(?:\.\w+)*(?::[\w.]+)?)["']""")
_UNKNOWN = re.compile(
    r"""\b(?:__import__|import_module)\b(?!\s*\(\s*["'][^"']*["']\s*[,)])"""
    r"""|\bmodules\b(?!\s*(?:\[|\.get\()\s*["'][^"']*["']\s*[],)])"""
)


def spell(node: ast.expr) -> str | None:
    """The dotted read that `node` stands for, or None; what ends in `.__dict__` is a whole namespace."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            held = spell(value)
            return f"{held}.{attribute}" if held is not None and _is_single(held) else None
        case ast.Subscript(value=value, slice=key):
            return _item(value, key)
        case ast.Call(func=function, args=arguments, keywords=keywords):
            return _call(function, arguments, keywords)
    return None


def rest_of(node: ast.expr) -> list[ast.expr]:
    """What is read besides by an expression that `spell` takes: keys, defaults, the function that looks up."""
    match node:
        case ast.Attribute(value=value):
            return rest_of(value)
        case ast.Subscript(value=value, slice=key):
            return [*([value] if _last(value) == "modules" else rest_of(value)), key]
        case ast.Call(func=function, args=arguments, keywords=keywords):
            further = [keyword.value for keyword in keywords]
            name = _last(function)
            if name in _IMPORTERS:
                used = arguments if name == "import_module" else [*arguments[:1], *arguments[3:]]
                return [*([function] if isinstance(function, ast.Attribute) else []), *used, *further]
            if isinstance(function, ast.Attribute):
                holder = function.value
                return [*([holder] if _last(holder) == "modules" else rest_of(holder)), *arguments, *further]
            if name in ("globals", "vars", "locals"):
                return [part for argument in arguments for part in rest_of(argument)]
            return [function, *rest_of(arguments[0]), *arguments[1:], *further]
    return []


def root(read: str) -> str:
    """The first part of a read: a name, unless it names a module."""
    return read.partition(".")[0]


def module_in(read: str) -> tuple[int, str] | None:
    """The level and name of the module that the first part of a read names, or None for a variable."""
    first = root(read)
    if not first.startswith(":"):
        return None
    name = first[1:].lstrip(":")
    return len(first) - 1 - len(name), name.replace(":", ".")


def is_namespace(read: str) -> bool:
    """True for a read of all that a module or object holds."""
    return read.rpartition(".")[2] == _NAMESPACE


def is_writer(function: ast.expr) -> bool:
    """True for methods of a namespace that change it, as `globals().update`."""
    if not isinstance(function, ast.Attribute) or function.attr not in _WRITERS:
        return False
    held = spell(function.value)
    return held is not None and is_namespace(held)


def quoted_in(text: str) -> set[str]:
    """The texts in a source that may name a module, or something in one."""
    return set(_QUOTED.findall(text))


def may_find_any(text: str) -> bool:
    """True for a source that may look up modules by names that it does not show."""
    return bool(_UNKNOWN.search(text))


def _is_single(read: str) -> bool:
    return read not in (ANY_MODULE, OWN_NAMES, SCOPE_NAMES) and not is_namespace(read)


def _last(function: ast.expr) -> str | None:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return None


def _item(holder: ast.expr, key: ast.expr) -> str | None:
    """`modules["k"]`, `vars(k)["C"]`, `globals()["C"]`."""
    if _last(holder) == "modules":
        return _module(key, None)
    held = spell(holder)
    if held is None or not is_namespace(held):
        return None
    whole = held.removesuffix(f".{_NAMESPACE}")
    if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
        return whole
    return key.value if whole == OWN_NAMES else f"{whole}.{key.value}"


def _call(function: ast.expr, arguments: list[ast.expr], keywords: list[ast.keyword]) -> str | None:
    name = _last(function)
    if name in _IMPORTERS and (arguments or keywords):
        return _imported(name, arguments, keywords)
    match function, arguments:
        case ast.Attribute(value=holder), [key, *_] if name in _ITEM_GETTERS:
            return _item(holder, key)
        case ast.Attribute(value=holder), [key, *_] if name in _GETTERS:
            return _attribute(holder, key)
        case ast.Name(id="getattr" | "hasattr"), [holder, key, *_]:
            return _attribute(holder, key)
        case ast.Name(id="vars"), [holder]:
            held = spell(holder)
            return f"{held}.{_NAMESPACE}" if held is not None and _is_single(held) else held
        case ast.Name(id="globals"), []:
            return f"{OWN_NAMES}.{_NAMESPACE}"
        case ast.Name(id="vars" | "locals"), []:
            return f"{SCOPE_NAMES}.{_NAMESPACE}"
    return None


def _attribute(holder: ast.expr, key: ast.expr) -> str | None:
    held = spell(holder)
    if held is None or not _is_single(held):
        return held
    is_plain = isinstance(key, ast.Constant) and isinstance(key.value, str)
    return f"{held}.{key.value}" if is_plain else held  # type: ignore[attr-defined]


def _imported(name: str, arguments: list[ast.expr], keywords: list[ast.keyword]) -> str:
    given = {keyword.arg: keyword.value for keyword in keywords}
    module = arguments[0] if arguments else given.get("name")
    if module is None:
        return ANY_MODULE
    if name == "import_module":
        return _module(module, arguments[1] if len(arguments) > 1 else given.get("package"))
    level = arguments[4] if len(arguments) > 4 else given.get("level", ast.Constant(0))
    items = arguments[3] if len(arguments) > 3 else given.get("fromlist")
    found = _module(module, None)
    if not isinstance(level, ast.Constant) or not isinstance(level.value, int) or found == ANY_MODULE:
        return ANY_MODULE
    if level.value > 0:
        return ":" * level.value + found
    gives_last = items is not None and not (isinstance(items, ast.List | ast.Tuple) and not items.elts)
    return found if gives_last else _root(found)


def _root(module: str) -> str:
    """What `__import__("a.b")` gives: a."""
    return ":" + module[1:].partition(":")[0]


def _module(node: ast.expr, package: ast.expr | None) -> str:
    """The module that a text names."""
    text = _text(node)
    if text is None or not MODULE_PATH.fullmatch(text) or ":" in text:
        return ANY_MODULE
    name = text.lstrip(".")
    level = len(text) - len(name)
    anchor = _text(package) if level and package is not None else None
    if level and anchor is None:
        return ANY_MODULE
    if anchor == "__name__":
        return ANY_MODULE if level > 1 else f":__name__:{name.replace('.', ':')}"
    if anchor not in (None, "__package__"):
        parts = str(anchor).split(".")
        return ":" + ":".join([*parts[: len(parts) - level + 1], name.replace(".", ":")])
    return ":" * (level + 1) + name.replace(".", ":")


def _text(node: ast.expr) -> str | None:
    """A text whose parts are constants, `__name__` and `__package__`, which stand for themselves; else None."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name) if name in _SELF:
            return name
        case ast.FormattedValue(value=value, format_spec=None):
            return _text(value)
        case ast.JoinedStr(values=values):
            return _joined(values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _joined([left, right])
    return None


def _joined(nodes: list[ast.expr]) -> str | None:
    parts = [_text(node) for node in nodes]
    return None if None in parts else "".join(part for part in parts if part is not None)
