"""Random functions that make classes and functions: what calls made before an edit follows it, or is named."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.tokenspeed_reload.test_properties import SETTINGS, fresh, number, observe, start
from tokenspeed_reload import Report

HEAD = """
import dataclasses, functools
X = {x}
class Base:
    def base(self): return "base"
class Other(Base):
    def base(self): return "other", super().base()
def deco(fn):
    @functools.wraps(fn)
    def wrapper(*args): return [fn(*args)]
    return wrapper
"""
MEMBERS = ("p", "q", "r")


@st.composite
def member(draw, name: str) -> str:
    n = draw(number)
    forms = [
        f"{name} = {n}",
        f"{name} = k + {n}",
        f"{name} = X",
        f"{name} = [{n}]",
        f"{name} = property(lambda self: {n})",
        f"def {name}(self): return {n}",
        f"def {name}(self): return k, {n}",
        f"def {name}(self): return j, {n}",
        f"def {name}(self, x={n}, *, y=X): return x, y",
        f"def {name}(self, x=k): return x",
        f"def {name}(self): return __class__.__name__, {n}",
        f"@property\ndef {name}(self): return k + {n}",
        f"@staticmethod\ndef {name}(): return {n}",
        f"@classmethod\ndef {name}(cls): return cls.__name__, {n}",
        f"@functools.cached_property\ndef {name}(self): return {n}",
        f"@deco\ndef {name}(self): return k, {n}",
        f"class {name}:\n    y = {n}\n    def z(self): return k",
        f"if {n} > 1:\n    def {name}(self): return 1\nelse:\n    {name} = {n}",
        f"for _i in range({n}): {name} = _i",
        "pass",
    ]
    return draw(st.sampled_from(forms))


@st.composite
def maker(draw) -> str:
    n = draw(number)
    header = draw(st.sampled_from(["", "(Base)", "(Other)", "(base)"]))
    decorator = draw(st.sampled_from(["", "", "@dataclasses.dataclass\n"]))
    field = f"field: int = {n}" if draw(st.booleans()) else f"field: int = k + {n}"
    body = "\n".join([field, *(draw(member(name)) for name in MEMBERS)])
    function = draw(
        st.sampled_from(
            [
                f"def f(x={n}): return x, k",
                f"def f(x=k, y={n}): return x, y",
                f"def f(x=X, *, y={n}): return x, y, j",
                f"f = lambda x={n}: (x, k)",
                f"def f(x: int = {n}) -> Base: return x",
                f"@deco\ndef f(x={n}): return x, k",
                f"def f():\n    yield {n}",
            ]
        )
    )
    made = indented(f"{decorator}class L{header}:\n{indented(body)}\n{function}\nreturn L, f")
    return HEAD.format(x=draw(number)) + f"def make(k, j, base):\n{made}\n"


def indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())


def make(name: str) -> tuple[Any, Any]:
    module = sys.modules[name]
    return module.make(1, 2, module.Base)


def look(cls: Any, function: Any) -> dict[str, Any]:
    members = {n for n in dir(cls) if not n.startswith("__")} - {"_i"}
    seen = {f"L.{n}": outcome(lambda n=n: observe(getattr(cls(), n))) for n in members}
    return seen | {
        "f": outcome(lambda: observe(function)),
        "f.annotations": [str(v) for v in function.__annotations__.values()],
    }


def outcome(look: Callable[[], Any]) -> Any:
    try:
        return look()
    except TypeError as error:  # of a function whose definition cannot follow, and is named
        return str(error)


def is_told(name: str, report: Report) -> bool:
    told = {s.definition for s in report.stale} | {n.what for n in report.needs_restart}
    parts = name.split(".")
    if parts[0] == "f" and "p_made.make.<locals>.<lambda>" in told:
        return True
    return any("p_made.make.<locals>." + ".".join(parts[:end]) in told for end in range(1, len(parts) + 1))


@SETTINGS
@given(sources=st.lists(maker(), min_size=2, max_size=4))
def test_what_calls_made_follows_or_is_reported(project, picture, sources):
    start(project, {"p_made": sources[0]})
    for source in sources[1:]:
        made = make("p_made")
        gc.collect()  # a class that an earlier call made is known to its bases as long as it exists
        before = picture({"made": made}, ["p_made"])
        project.write_module("p_made", source)
        expected = fresh({"p_made": source}, lambda name: look(*make(name)))["p_made"]
        transaction = project.reloader.reload()
        transaction.swap()
        assert picture({"made": made}, ["p_made"]) == before
        transaction.swap()
        transaction.commit()
        for name, value in look(*made).items():
            if not is_told(name, transaction.report):
                assert value == expected.get(name), name
        missing = expected.keys() - look(*made).keys()
        assert all(is_told(name, transaction.report) for name in missing), missing
