"""Rewrites that leave what a program computes as it is: refactorings at a random place of a random module.

Each takes a generator of random numbers and edits the sources, or returns False where it finds no place.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator
from itertools import pairwise

from tests.fuzz.sources import Function, Sources, functions, replace_node

Rewrite = Callable[[random.Random, Sources, str, str], bool]
"""Called with the module and a suffix that no other name has."""


def comment(rng: random.Random, sources: Sources, module: str, suffix: str) -> bool:
    """A comment above a statement."""
    body = ast.parse(sources[module]).body
    node = rng.choice(body[1:] or body)
    line = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) - 1
    lines = sources[module].splitlines()
    sources[module] = "\n".join([*lines[:line], f"# A note, {suffix}.", *lines[line:]]) + "\n"
    return True


def docstring(rng: random.Random, sources: Sources, module: str, suffix: str) -> bool:
    """A function's docstring becomes another one."""

    def edit(node: Function) -> bool:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        node.body.insert(0, ast.Expr(ast.Constant(f"Told anew, {suffix}.")))
        return True

    return _edit_function(rng, sources, module, edit)


def guarded_body(rng: random.Random, sources: Sources, module: str, suffix: str) -> bool:
    """A function's body stands in a try, an if or a loop of one turn."""

    def edit(node: Function) -> bool:
        has_doc = ast.get_docstring(node) is not None
        head, rest = (node.body[:1], node.body[1:]) if has_doc else ([], node.body)
        if not rest:
            return False
        kind = rng.randrange(3)
        if kind == 0:
            block: ast.stmt = ast.Try(body=rest, handlers=[], orelse=[], finalbody=[ast.Pass()])
        elif kind == 1:
            block = ast.If(test=ast.Constant(True), body=rest, orelse=[])
        else:
            if any(isinstance(inner, ast.Break | ast.Continue) for inner in ast.walk(node)):
                return False
            name = ast.Name(f"turn_{suffix}", ast.Store())
            block = ast.For(
                target=name, iter=ast.parse("(0,)", mode="eval").body, body=rest, orelse=[], type_comment=None
            )
        node.body = [*head, block]
        return True

    return _edit_function(rng, sources, module, edit)


def named_result(rng: random.Random, sources: Sources, module: str, suffix: str) -> bool:
    """What a function returns gets a name first."""

    class Name(ast.NodeTransformer):
        done = False

        def visit_Return(self, node: ast.Return) -> ast.AST | list[ast.stmt]:
            if node.value is None:
                return node
            self.done = True
            target = ast.Name(f"result_{suffix}", ast.Store())
            return [
                ast.Assign(targets=[target], value=node.value, lineno=0),
                ast.Return(ast.Name(f"result_{suffix}", ast.Load())),
            ]

        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
            return node

        def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
            return node

    def edit(node: Function) -> bool:
        name = Name()
        node.body = [part for s in node.body for part in _as_list(name.visit(s))]
        return name.done

    return _edit_function(rng, sources, module, edit)


def renamed_local(rng: random.Random, sources: Sources, module: str, suffix: str) -> bool:
    """A local variable gets another name."""

    def edit(node: Function) -> bool:
        arguments = {
            a.arg for inner in ast.walk(node) if isinstance(inner, ast.arguments) for a in _all_arguments(inner)
        }
        fixed = {n for inner in ast.walk(node) if isinstance(inner, ast.Global | ast.Nonlocal) for n in inner.names}
        stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        choices = sorted(stored - arguments - fixed)
        if not choices:
            return False
        old = rng.choice(choices)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id == old:
                inner.id = f"{old}_{suffix}"
        return True

    return _edit_function(rng, sources, module, edit)


def new_parameter(rng: random.Random, sources: Sources, module: str, suffix: str) -> bool:
    """A function takes one more keyword, which nobody gives."""

    def edit(node: Function) -> bool:
        if node.args.kwarg or any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list):
            return False
        node.args.kwonlyargs.append(ast.arg(f"option_{suffix}"))
        node.args.kw_defaults.append(ast.Constant(rng.choice([None, 1, "text"])))
        return True

    return _edit_function(rng, sources, module, edit)


def no_annotations(rng: random.Random, sources: Sources, module: str, suffix: str) -> bool:
    """A function loses its annotations."""

    def edit(node: Function) -> bool:
        node.returns = None
        for argument in _all_arguments(node.args):
            argument.annotation = None
        return True

    return _edit_function(rng, sources, module, edit)


def decorator(rng: random.Random, sources: Sources, module: str, suffix: str) -> bool:
    """A decorator that changes nothing, with or without a wrapper."""
    wraps = rng.random() < 0.5

    def edit(node: Function) -> bool:
        node.decorator_list.append(ast.Name(f"same_{suffix}", ast.Load()))
        return True

    if not _edit_function(rng, sources, module, edit):
        return False
    body = "    return function"
    if wraps:
        body = (
            "    @functools.wraps(function)\n    def wrapper(*args, **kwargs):\n"
            "        return function(*args, **kwargs)\n\n    return wrapper"
        )
    sources.insert_above(module, f"import functools\n\n\ndef same_{suffix}(function):\n{body}\n\n")
    return True


def extracted_body(rng: random.Random, sources: Sources, module: str, suffix: str) -> bool:
    """What a function does moves to a new function, which it calls."""
    text = sources[module]
    tree = ast.parse(text)
    _, node = rng.choice(list(functions(tree)) or [("", None)])
    if node is None or node.decorator_list or _uses(node, "super", "__class__") or node.args.kwarg or node.args.vararg:
        return False
    if any(_uses(decorator, node.name) for _, other in functions(tree) for decorator in other.decorator_list):
        return False  # it runs before the new function is there
    if re.search(r"\b__\w*[a-z]\b", ast.unparse(node).replace(f"def {node.name}", "")):
        return False  # private names belong to the class
    inner = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(inner, Function)
    inner.name = f"do_{suffix}"
    arguments = [ast.Name(a.arg, ast.Load()) for a in (*node.args.posonlyargs, *node.args.args)]
    keywords = [ast.keyword(a.arg, ast.Name(a.arg, ast.Load())) for a in node.args.kwonlyargs]
    call = ast.Call(ast.Name(inner.name, ast.Load()), arguments, keywords)  # type: ignore[arg-type]
    node.body = [ast.Return(call)]
    sources[module] = replace_node(text, node, node)
    sources.append(module, ast.unparse(inner))
    return True


def moved_to_a_new_file(rng: random.Random, sources: Sources, module: str, suffix: str) -> bool:
    """A function that needs nothing of its module moves to a file beside it."""
    text = sources[module]
    tree = ast.parse(text)
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    own = {n.name for n in tree.body if isinstance(n, Function | ast.ClassDef)}
    own |= {
        n.id
        for s in tree.body
        if not isinstance(s, Function | ast.ClassDef)
        for n in ast.walk(s)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    free = [n for n in tree.body if isinstance(n, Function) and not n.decorator_list and not _uses(n, *own)]
    if not free or any(n.level for n in imports if isinstance(n, ast.ImportFrom)):
        return False
    node = rng.choice(free)
    package = module if _is_package(module) else module.rpartition(".")[0]
    new = f"{package}.moved_{suffix}"
    sources[new] = "\n".join([*map(ast.unparse, imports), "", "", ast.unparse(node)]) + "\n"
    sources[module] = replace_node(text, node, None)
    sources.insert_above(module, f"from {new} import {node.name}")
    return True


def renamed_function(rng: random.Random, sources: Sources, module: str, suffix: str) -> bool:
    """A private function of a module gets another name."""
    text = sources[module]
    private = [n.name for n in ast.parse(text).body if isinstance(n, Function) and re.match("_[a-z]", n.name)]
    if not private:
        return False
    old = rng.choice(private)
    if len(re.findall(rf"[.\"']{old}\b", text)):
        return False
    sources[module] = re.sub(rf"\b{old}\b", f"{old}_{suffix}", text)
    return True


def swapped_order(rng: random.Random, sources: Sources, module: str, suffix: str) -> bool:
    """Two neighbouring functions change places."""
    text = sources[module]
    body = ast.parse(text).body
    pairs = [(a, b) for a, b in pairwise(body) if _is_plain(a) and _is_plain(b)]
    if not pairs:
        return False
    first, second = rng.choice(pairs)
    text = replace_node(text, second, first)
    sources[module] = replace_node(text, first, second)
    return True


def computed_constant(rng: random.Random, sources: Sources, module: str, suffix: str) -> bool:
    """A constant comes from a function."""
    text = sources[module]
    constants = [
        n
        for n in ast.parse(text).body
        if isinstance(n, ast.Assign)
        and isinstance(n.targets[0], ast.Name)
        and n.targets[0].id.isupper()
        and not n.targets[0].id.startswith("_")
    ]
    if not constants:
        return False
    node = rng.choice(constants)
    node.value = ast.Call(ast.Name(f"value_{suffix}", ast.Load()), [node.value], [])
    sources[module] = replace_node(text, node, node)
    sources.insert_above(module, f"def value_{suffix}(value):\n    return value\n\n")
    return True


def new_definitions(rng: random.Random, sources: Sources, module: str, suffix: str) -> bool:
    """A constant, a function, a class or an import that nobody uses."""
    lines = (
        f"ADDED_{suffix.upper()} = {{'a': [1, 2], 'b': ({rng.random()},)}}",
        f"def added_{suffix}(x=1):\n    return x",
        f"class Added_{suffix}:\n    size = {rng.randrange(9)}\n\n    def get(self):\n        return self.size",
        f"import collections.abc as added_{suffix}",
        f"ADDED_{suffix} = [i * i for i in range({rng.randrange(9)})]",
        f"import functools\n\n\n@functools.cache\ndef added_{suffix}(x=1):\n    return x",
        f"import enum\n\n\nclass Added_{suffix}(enum.Enum):\n    ONE = {rng.randrange(9)}",
    )
    sources.append(module, rng.choice(lines))
    return True


def new_member(rng: random.Random, sources: Sources, module: str, suffix: str) -> bool:
    """A class gets a method or an attribute."""
    text = sources[module]
    classes = [n for n in ast.parse(text).body if isinstance(n, ast.ClassDef)]
    if not classes:
        return False
    node = rng.choice(classes)
    member = rng.choice(
        (
            f"def added_{suffix}(self, x=0):\n    return x",
            f"added_{suffix} = {rng.randrange(9)}",
            f"@property\ndef added_{suffix}(self):\n    return {rng.randrange(9)}",
            f"@staticmethod\ndef added_{suffix}(x):\n    return x",
            f"@classmethod\ndef added_{suffix}(cls):\n    return cls.__name__",
        )
    )
    # Behind the whole class: a dataclass's fields stay where they are.
    lines = text.splitlines()
    lines[node.end_lineno : node.end_lineno] = ["", *("    " + line for line in member.splitlines())]
    sources[module] = "\n".join(lines) + "\n"
    return True


REWRITES: tuple[Rewrite, ...] = (
    comment,
    docstring,
    guarded_body,
    named_result,
    renamed_local,
    new_parameter,
    no_annotations,
    decorator,
    extracted_body,
    moved_to_a_new_file,
    renamed_function,
    swapped_order,
    computed_constant,
    new_definitions,
    new_member,
)


def _edit_function(rng: random.Random, sources: Sources, module: str, edit: Callable[[Function], bool]) -> bool:
    text = sources[module]
    found = list(functions(ast.parse(text)))
    if not found:
        return False
    _, node = rng.choice(found)
    if not edit(node):
        return False
    sources[module] = replace_node(text, node, ast.fix_missing_locations(node))
    return True


def _is_plain(node: ast.stmt) -> bool:
    return isinstance(node, Function) and not (node.decorator_list or node.args.defaults or node.args.kw_defaults)


def _is_package(module: str) -> bool:
    from tests.e2e.harness import installed_path

    return installed_path(module).name == "__init__.py"


def _uses(node: ast.AST, *names: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(node))


def _all_arguments(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    yield from (a for a in (arguments.vararg, arguments.kwarg) if a is not None)


def _as_list(value: ast.AST | list[ast.stmt]) -> list[ast.stmt]:
    return value if isinstance(value, list) else [value]  # type: ignore[list-item]
