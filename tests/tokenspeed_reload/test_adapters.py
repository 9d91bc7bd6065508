"""Adapters that a program brings: what they are asked, and when."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from tokenspeed_reload import Merge
from tokenspeed_reload.undo import FunctionState

DSL = """
import functools

def traced(function):
    function.is_traced = True
    @functools.wraps(function)
    def wrapper(*args):
        if not hasattr(function, "original"):
            function.original = function.__code__
            function.__code__ = function.__code__.replace(co_filename="<traced>", co_firstlineno=1)
        return function(*args)
    return wrapper
"""


class TracedAdapter:
    """Updates functions into which the library of this test puts code of its own on their first call."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def matches(self, live: Any, new: Any, merge: Merge) -> bool:
        return self.wraps(live) and self.wraps(new) and "__wrapped__" not in vars(live)

    def merge(self, live: Any, new: Any, where: str, merge: Merge) -> Any:
        merge.follow(live, new)
        merge.log.once(FunctionState, live)
        vars(live).pop("original", None)
        live.__code__ = new.__code__
        merge.touch(live)
        return live

    def begin(self, merge: Merge) -> None:
        self.calls.append("begin")

    def wraps(self, value: Any) -> bool:
        return type(value) is FunctionType and "is_traced" in vars(value)

    def kinds(self) -> set[type]:
        return {FunctionType}

    def finish(self, objects: list[Any], merge: Merge) -> None:
        self.calls.append(f"finish {any(self.wraps(o) for o in objects)}")


def test_functions_into_which_a_library_puts_code_of_its_own(project):
    adapter = TracedAdapter()
    text = "from dsl import traced\n@traced\ndef f(x): return x + {0}\n"
    project.write_module("dsl", DSL)
    project.write_module("m", text.format(1))
    reloader = project.watch("m", adapters=[adapter])
    m = project.load("m")
    held, inner = m.f, m.f.__wrapped__
    assert held(1) == 2 and inner.__code__.co_filename == "<traced>"
    project.write_module("m", text.format(5))
    transaction = reloader.reload()
    assert adapter.calls == ["begin", "finish True"]
    assert m.f is held and held.__wrapped__ is inner and held(1) == 6
    transaction.swap()
    assert held(1) == 2 and m.f is held
    transaction.commit()
    assert held(1) == 6
