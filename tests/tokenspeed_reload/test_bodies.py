"""What a report says of an edit that changes nothing but code inside of functions, and of any that does more."""

from __future__ import annotations

import gc

import pytest

from tokenspeed_reload import Bodies

SOURCE = """
from functools import lru_cache
from weakref import ref

FACTOR = 2
TABLE = {"a": 1}
SEEN_CACHE = {}


def scale(x):
    return helper(x) * FACTOR


def helper(x):
    return x + 1


@lru_cache
def remembered(x):
    return x


class Layer:
    def forward(self, x):
        return x
"""


def edited(project, old: str, new: str, *, call: str = "") -> Bodies:
    project.write(prog=SOURCE)
    project.watch("prog")
    module = project.load("prog")
    exec(call, vars(module))
    assert old in SOURCE
    project.write(prog=SOURCE.replace(old, new, 1))
    return project.reload("prog").bodies


@pytest.mark.parametrize(
    ("old", "new", "function"),
    [
        ("helper(x) * FACTOR", "helper(x) - FACTOR", "scale"),
        ("return x + 1", "y = x\n    return y + 2", "helper"),
        ("        return x", "        return x * 3", "Layer.forward"),
    ],
)
def test_a_body_alone(project, old: str, new: str, function: str) -> None:
    bodies = edited(project, old, new)
    assert [changed.__qualname__ for changed in bodies.functions] == [function]
    assert not bodies.beyond and not bodies.kernels


def test_a_class_that_ends_during_the_reload_is_no_change(project) -> None:
    gc.collect()
    gc.disable()
    try:
        # It is garbage that only a collection finds, and the reload collects.
        bodies = edited(project, "return x + 1", "return x + 2", call="passing = ref(type('Passing', (Layer,), {}))")
    finally:
        gc.enable()
    assert project.load("prog").passing() is None
    assert [changed.__qualname__ for changed in bodies.functions] == ["helper"]
    assert not bodies.beyond


@pytest.mark.parametrize("new", ["\n\n\nFACTOR = 2", "# two\nFACTOR = 2", "FACTOR = 1 + 1"])
def test_what_changes_nothing(project, new: str) -> None:
    bodies = edited(project, "FACTOR = 2", new)
    assert not bodies.functions and not bodies.beyond


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("FACTOR = 2", "FACTOR = 3"),
        ('"a": 1', '"a": 2'),
        ("def helper(x)", "def helper(x, y=1)"),
        ("def helper(x)", "def helper(y)"),
        ("def helper(x):\n    return", "def helper(x):\n    yield"),
        ("def helper", "def further():\n    pass\n\n\ndef helper"),
        ("@lru_cache\n", ""),
        ("class Layer:", "class Layer:\n    size = 1\n"),
        ("class Layer:", "class Layer(dict):"),
        ("from functools import lru_cache", "import json\nfrom functools import lru_cache"),
        ("SEEN_CACHE = {}\n", ""),
    ],
)
def test_what_is_more_than_a_body(project, old: str, new: str) -> None:
    assert edited(project, old, new).beyond


@pytest.mark.parametrize("call", ["SEEN_CACHE['x'] = 1", "remembered(1)"])
def test_a_cache_that_is_emptied_is_more_than_a_body(project, call: str) -> None:
    assert edited(project, "return x + 1", "return x + 2", call=call).beyond
    assert not edited(project, "return x + 1", "return x + 2").beyond
