"""The forward packages hold no mutable module state, since a reload runs their modules again."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from tokenspeed.forward import FORWARD_PACKAGES

IMMUTABLE_CALLS = {"MappingProxyType", "TypeVar", "ParamSpec", "frozenset", "tuple", "float", "int", "str"}
CACHE_DECORATORS = {"cache", "lru_cache"}


def sources() -> list[Path]:
    specs = [importlib.util.find_spec(package) for package in FORWARD_PACKAGES]
    roots = [Path(root) for spec in specs if spec for root in spec.submodule_search_locations or ()]
    return sorted(path for root in roots for path in root.rglob("*.py"))


def faults(tree: ast.Module) -> list[str]:
    """What is mutable at module or class level, and what rebinds module names."""
    found = [f"line {n.lineno}: global statement" for n in ast.walk(tree) if isinstance(n, ast.Global)]
    scopes: list[ast.Module | ast.ClassDef] = [
        tree,
        *(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)),
    ]
    for scope in scopes:
        for statement in scope.body:
            if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                names = {n.id for t in _targets(statement) for n in ast.walk(t) if isinstance(n, ast.Name)}
                if names != {"__all__"} and not _immutable(statement.value, names):
                    found.append(f"line {statement.lineno}: {', '.join(sorted(names))} is mutable")
            elif isinstance(statement, ast.AugAssign | ast.For | ast.While | ast.With | ast.Try | ast.Delete):
                found.append(f"line {statement.lineno}: a statement that acts at import")
    return found


def _targets(statement: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return statement.targets if isinstance(statement, ast.Assign) else [statement.target]


def _immutable(value: ast.expr, names: set[str]) -> bool:
    if isinstance(value, ast.Dict | ast.List | ast.Set):
        elements = value.keys if isinstance(value, ast.Dict) else value.elts
        return not elements and all(name.lower().endswith("cache") for name in names)
    if isinstance(value, ast.Call):
        called = value.func.id if isinstance(value.func, ast.Name) else getattr(value.func, "attr", "")
        return called in IMMUTABLE_CALLS or called in CACHE_DECORATORS
    if isinstance(value, ast.Tuple):
        return all(_immutable(element, names) for element in value.elts)
    return not isinstance(value, ast.ListComp | ast.DictComp | ast.SetComp | ast.GeneratorExp)


@pytest.mark.parametrize("path", sources(), ids=lambda path: "/".join(path.parts[-3:]))
def test_module_has_no_mutable_state(path: Path) -> None:
    assert faults(ast.parse(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    ["X = []", "X = {'a': 1}", "X: dict = dict()", "class A:\n    x = []",
     "def f():\n    global x\n    x = 1", "X = (1, [])", "X = object()", "X = [i for i in y]", "X += 1",
     "TABLE = {}"],
)  # fmt: skip
def test_mutable_state_is_found(source: str) -> None:
    assert faults(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    ["X = 2**3", "X = ('a', 1)", "X = MappingProxyType({'a': 1})", "_PLAN_CACHE = {}", "__all__ = ['a']",
     "X = torch.float32", "class A:\n    x: int = 1", "X = Mapping[str, int]"],
)  # fmt: skip
def test_constants_and_caches_pass(source: str) -> None:
    assert faults(ast.parse(source)) == []
