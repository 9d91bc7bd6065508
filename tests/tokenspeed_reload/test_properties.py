"""Random programs and random edits: what a reload leaves equals a fresh run, and nothing drifts."""

from __future__ import annotations

import sys
import types
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
    ]
    if provider:
        forms += [f"from {provider} import {other} as {name}", f"{name} = {provider}.{other}"]
    return draw(st.sampled_from(forms))


HEAD = """
import functools
def value(x):
    return x.__name__ if callable(x) else x
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
    return {"p_one": draw(module(None)), "p_two": draw(module("p_one"))}


def observe(value: Any, depth: int = 0) -> Any:
    """What can be seen of a value, without identities."""
    if depth > 3:
        return "..."
    if isinstance(value, type):
        instance = value()
        members = sorted(n for n in vars(value) if not n.startswith("__"))
        seen = [(name, observe(getattr(instance, name), depth + 1)) for name in members]
        return (value.__name__, [base.__name__ for base in value.__mro__], seen)
    if isinstance(value, types.GeneratorType):
        return list(value)
    if callable(value):
        return (value.__name__, observe(value(), depth + 1))
    if isinstance(value, list | tuple):
        return [observe(item, depth + 1) for item in value]
    return value


def look(name: str) -> Any:
    return {n: observe(v) for n, v in vars(sys.modules[name]).items() if n in NAMES}


def fresh(sources: dict[str, str]) -> Any:
    """Run the sources in new modules, as a new interpreter would."""
    saved = {name: sys.modules.pop(name) for name in sources}
    try:
        for name, text in sources.items():
            new = sys.modules[name] = types.ModuleType(name)
            exec(compile(text, name, "exec"), new.__dict__)
        return {name: look(name) for name in sources}
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
    first = {"p_one": HEAD, "p_two": HEAD}
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


@SETTINGS
@given(first=program(), second=program())
def test_undo_restores_everything(project, picture, first, second):
    start(project, {"p_one": HEAD, "p_two": HEAD})
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
    start(project, {"p_one": HEAD, "p_two": HEAD})
    expected = fresh(first)
    if expected is None or fresh(second) is None:
        return
    for sources in (first, second, first, second, first):
        for name, text in sources.items():
            project.write_module(name, text)
        project.reload()
    assert {name: look(name) for name in first} == expected
    assert project.reload().objects_patched == 0
