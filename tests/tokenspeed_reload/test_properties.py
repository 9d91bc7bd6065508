"""Random programs and random edits: what a reload leaves equals a fresh run, and nothing drifts."""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tokenspeed_reload import ReloadError

SETTINGS = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # a failing pair of programs is short enough to read
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

NAMES = ("a", "b", "c", "d")
number = st.integers(0, 3)


@st.composite
def statement(draw, name: str, provider: str | None) -> str:
    n = draw(number)
    other = draw(st.sampled_from(NAMES))
    source = draw(st.sampled_from([str(n), other, f"{provider}.{other}"] if provider else [str(n), other]))
    forms = [
        f"{name} = {n}",
        f"{name} = [{n}, {n + 1}]",
        f"{name} = {{'k': {n}}}",
        f"{name} = {{}}",
        f"def {name}(x={n}): return ('{name}', x, value({source}))",
        f"def {name}(x={n}): return {n}",
        f"def {name}(x=0, y={n}):\n    yield y",
        f"{name} = lambda x=0: {n}",
        f"@functools.cache\ndef {name}(x={n}): return value({source})",
        f"@deco\ndef {name}(x={n}): return {n}",
        f"def _mk_{name}(p, q):\n    def inner(x=0): return p + {n}\n    return inner\n{name} = _mk_{name}({n}, 2)",
        f"def _mk_{name}(p, q):\n    def inner(x=0): return p + q\n    return inner\n{name} = _mk_{name}({n}, 2)",
        f"class {name}:\n    v = {n}\n    def m(self): return ({n}, value({source}))",
        f"class {name}:\n    @property\n    def m(self): return {n}\n    @staticmethod\n    def s(): return {n}",
        f"class _B{name}:\n    def m(self): return {n}\n"
        f"class {name}(_B{name}):\n    def m(self): return super().m() + 1",
        f"try:\n    {name} = value({source})\nexcept NameError:\n    {name} = 'none'",
        f"@dataclasses.dataclass\nclass {name}:\n    x: int = {n}\n    def m(self): return self.x, {n}",
        f"class {name}(enum.Enum):\n    ONE = {n}\n    TWO = 'two'\n    def m(self): return {n}",
        f"if {n} > 1:\n    def {name}(x=0): return {n}\nelse:\n    {name} = {n}",
        f"if {n} > 1:\n    class {name}:\n        def m(self): return {n}\nelse:\n    def {name}(x=1): return x",
        f"{name} = 0\nfor _i in range({n}):\n    {name} += _i",
        f"def {name}(x={n}): return x\n{name}.mark = {n}",
        f"class {name}:\n    @functools.cached_property\n    def m(self): return {n}\n"
        f"    @classmethod\n    def c(cls): return cls.__name__, {n}",
        f"class {name}(Base):\n    def m(self): return super().m() + {n}",
        f"{name} = functools.partial(value, {n})",
        f"{name} = [lambda x=0: {n}, lambda x=1: x]",
        f"async def {name}(x=0): return {n}",
    ]
    if provider:
        forms += [f"from {provider} import {other} as {name}", f"{name} = {provider}.{other}"]
        forms += [
            f"class {name}({provider}.{other} if kind({provider}.{other}) else object):\n    def k(self): return {n}",
            f"@{provider}.deco\ndef {name}(x={n}): return x",
            f"def {name}(x=0):\n    from {provider} import {other}\n    return value({other})",
        ]
    return draw(st.sampled_from(forms))


HEAD = """
import dataclasses, enum, functools
def value(x):
    return getattr(x, "__name__", "none") if callable(x) else x
def kind(x):
    return type(x) is type
class Base:
    def m(self): return 1
def deco(fn):
    @functools.wraps(fn)
    def wrapper(x=0): return [fn(x)]
    return wrapper
"""


@st.composite
def module(draw, provider: str | None) -> str:
    names = draw(st.permutations(NAMES))
    lines = [draw(statement(name, provider)) for name in names]
    return HEAD + (f"import {provider}\n" if provider else "") + "\n".join(lines) + "\n"


@st.composite
def program(draw) -> dict[str, str]:
    return {"p_one": draw(module(None)), "p_two": draw(module("p_one")), "p_three": draw(module("p_two"))}


def observe(value: Any, depth: int = 0) -> Any:
    """What can be seen of a value, without identities."""
    if depth > 3:
        return "..."
    if isinstance(value, enum.EnumMeta):
        return (value.__name__, [(e.name, observe(e.value, depth + 1), e.m()) for e in value])
    if isinstance(value, type):
        instance = value()
        members = sorted(n for n in dir(value) if not n.startswith("__"))
        seen = [(name, observe(getattr(instance, name, "unset"), depth + 1)) for name in members]
        return (value.__name__, [base.__name__ for base in value.__mro__], seen, dataclasses.is_dataclass(value))
    if isinstance(value, types.GeneratorType):
        return list(value)
    if isinstance(value, types.CoroutineType):
        value.close()
        return "coroutine"
    if callable(value):
        marks = getattr(value, "mark", None)
        return (getattr(value, "__name__", "?"), observe(value(), depth + 1), marks)
    if isinstance(value, list | tuple):
        return [observe(item, depth + 1) for item in value]
    return value


def definitions(name: str) -> dict[str, Any]:
    """The functions and classes that a module defines under their own names."""
    found = {n: vars(sys.modules[name]).get(n) for n in NAMES}
    own = (types.FunctionType, type)
    return {n: v for n, v in found.items() if isinstance(v, own) and (v.__module__, v.__qualname__) == (name, n)}


def look(name: str) -> Any:
    return {n: observe(v) for n, v in vars(sys.modules[name]).items() if n in NAMES}


def fresh(sources: dict[str, str], seen: Callable[[str], Any] | None = None) -> Any:
    """What is seen of the sources run in new modules, as a new interpreter would."""
    saved = {name: sys.modules.pop(name) for name in sources}
    try:
        for name, text in sources.items():
            new = sys.modules[name] = types.ModuleType(name)
            exec(compile(text, name, "exec", dont_inherit=True), new.__dict__)
        return {name: (seen or look)(name) for name in sources}
    except Exception:
        return None
    finally:
        sys.modules.update(saved)


def start(project, sources):
    project.close()
    for name, text in sources.items():
        project.write_module(name, text)
    project.watch(*sources)
    for name in sources:
        project.load(name)


@SETTINGS
@given(programs=st.lists(program(), min_size=2, max_size=5))
def test_a_reloaded_program_equals_a_fresh_one(project, programs):
    first = {"p_one": HEAD, "p_two": HEAD, "p_three": HEAD}
    start(project, first)
    for sources in programs:
        for name, text in sources.items():
            project.write_module(name, text)
        expected = fresh(sources)
        try:
            project.reload()
        except ReloadError:
            assert expected is None
        else:
            assert {name: look(name) for name in sources} == expected


def observe_definitions(name: str) -> dict[str, Any]:
    return {n: observe(v) for n, v in definitions(name).items()}


@SETTINGS
@given(programs=st.lists(program(), min_size=2, max_size=3))
def test_what_is_held_follows_or_is_reported(project, programs):
    start(project, {"p_one": HEAD, "p_two": HEAD, "p_three": HEAD})
    for sources in programs:
        for name, text in sources.items():
            project.write_module(name, text)
        expected = fresh(sources, observe_definitions)
        held = {name: definitions(name) for name in sources}
        try:
            report = project.reload()
        except ReloadError:
            assert expected is None
            continue
        told = {s.definition for s in report.stale} | {n.what for n in report.needs_restart}
        for module, objects in held.items():
            for name, value in objects.items():
                now = expected[module].get(name)
                if now is not None and f"{module}.{name}" not in told:
                    assert observe(value) == now, f"{module}.{name}"


@SETTINGS
@given(first=program(), second=program())
def test_undo_restores_everything(project, picture, first, second):
    start(project, {"p_one": HEAD, "p_two": HEAD, "p_three": HEAD})
    if fresh(first) is None:
        return
    for name, text in first.items():
        project.write_module(name, text)
    project.reload()
    before = picture({}, list(first))
    for name, text in second.items():
        project.write_module(name, text)
    try:
        transaction = project.reloader.reload()
    except ReloadError:
        assert picture({}, list(first)) == before
        return
    after = picture({}, list(first))
    transaction.swap()
    assert picture({}, list(first)) == before
    transaction.swap()
    assert picture({}, list(first)) == after
    transaction.undo()
    assert picture({}, list(first)) == before


@SETTINGS
@given(first=program(), second=program())
def test_there_and_back_drifts_by_nothing(project, first, second):
    start(project, {"p_one": HEAD, "p_two": HEAD, "p_three": HEAD})
    expected = fresh(first)
    if expected is None or fresh(second) is None:
        return
    for sources in (first, second, first, second, first):
        for name, text in sources.items():
            project.write_module(name, text)
        project.reload()
    assert {name: look(name) for name in first} == expected
    assert project.reload().objects_patched == 0
