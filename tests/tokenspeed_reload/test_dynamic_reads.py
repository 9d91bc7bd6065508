"""Values that a module reads by a name in a text, or from a module object: they are built anew like all others."""

from __future__ import annotations

import pytest

MODULE = ["__import__('pkg.k').k", "importlib.import_module('pkg.k')", "sys.modules['pkg.k']"]
MODULE += ["importlib.import_module('.k', __package__)", "importlib.import_module(__package__ + '.k')"]
MODULE += ["sys.modules.get('pkg.k')", "__import__('k', globals(), locals(), [], 1)", "load('pkg.k')"]
MODULE += ["importlib.import_module(f'{__package__}.k')", "importlib.import_module(NAME)", "imp('pkg.k')", "k", "pkg.k"]
MODULE += ["[importlib.import_module(n) for n in NAMES][0]", "modules['pkg.k']", "getattr(pkg, 'k')", "HELD['k']"]
MODULE += ["vars(pkg)['k']", "held.k", "sys.modules[NAME]", "eval('pkg.k')", "importlib.__import__('pkg.k').k"]

READ = ["{}.C", "getattr({}, 'C')", "vars({})['C']", "{}.__dict__['C']", "getattr({}, WHICH)", "{}.__dict__.get('C')"]
READ += ["operator.attrgetter('C')({})", "{}.__getattribute__('C')", "dict(inspect.getmembers({}))['C']"]
READ += ["(lambda m: m.C)({})", "eval('{}.C')", "[{}][0].C", "dict({}.__dict__)['C']", "getattr({}, 'x', {}.C)"]

OTHER = ["pkgutil.resolve_name('pkg.k:C')", "pkgutil.resolve_name('pkg.k.C')", "get('pkg.k', 'C')", "fetch()"]
OTHER += ["eval('C', vars(k))", "'{k.C}'.format(k=k)", "inner()", "eval(TEXT)", "fetch_later()", "Late.get()"]

HEAD = """
import importlib, inspect, operator, pkgutil, sys
from importlib import import_module as imp
from sys import modules
import pkg.k
from pkg import k
from pkg.helper import load, get
from types import SimpleNamespace
NAME = 'pkg.k'
NAMES = [NAME]
WHICH = 'C'
TEXT = 'k.C'
HELD = {'k': k}
held = SimpleNamespace(k=k)
def fetch(): return sys.modules['pkg.k'].C
def inner():
    from . import k as j
    return j.C
def fetch_later():
    def deeper(): return load(NAME).C
    return deeper()
class Late:
    @staticmethod
    def get(): return getattr(importlib.import_module('.k', 'pkg'), 'C')
"""
HELPER = """
from importlib import import_module
def load(name): return import_module(name)
def get(name, attribute): return getattr(import_module(name), attribute)
"""


def look(project, head: str, expression: str) -> tuple[object, ...]:
    """The values before and after an edit of what the expression reads."""
    project.write(pkg__init="", pkg__helper=HELPER, pkg__k="C = 'one'\nD = 1")
    project.write_module("pkg.u", f"{head}\nY = [1, {expression}]\nSAME = object()\nclass A:\n    y = Y")
    project.watch("pkg")
    project.load("pkg.k")
    u = project.load("pkg.u")
    held, same = u.A, u.SAME
    assert u.Y == [1, "one"]
    project.write_module("pkg.k", "C = 'two'\nD = 1")
    transaction = project.reloader.reload()
    after = u.Y
    assert (held, same) == (u.A, u.SAME)
    assert held.y == u.Y
    transaction.swap()
    assert u.Y == [1, "one"]
    transaction.swap()
    transaction.commit()
    assert after == u.Y
    return tuple(after)


@pytest.mark.parametrize("module", MODULE)
def test_a_module_that_is_found_by_name(project, module):
    assert look(project, HEAD, f"{module}.C") == (1, "two")


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("module", ["k", 'importlib.import_module("pkg.k")', "sys.modules[NAME]"])
def test_an_attribute_that_is_found_by_name(project, module, read):
    assert look(project, HEAD, read.replace("{}", module)) == (1, "two")


@pytest.mark.parametrize("expression", OTHER)
def test_other_ways(project, expression):
    assert look(project, HEAD, expression) == (1, "two")


@pytest.mark.parametrize("module", MODULE[:6])
def test_without_an_import_of_the_module(project, module):
    head = "import importlib, sys\nfrom pkg.helper import load"
    assert look(project, head, f"{module}.C") == (1, "two")


@pytest.mark.parametrize("statement", ["_m = importlib.import_module('pkg.k')", "import pkg.k as _m"])
def test_through_a_name_that_is_deleted(project, statement):
    head = f"import importlib\n{statement}\nX = _m.C\ndel _m"
    assert look(project, head, "X") == (1, "two")


OWN = ["globals()['C']", "globals().get('C')", "vars()['C']", "locals()['C']", "eval('C')", "eval(TEXT)"]
OWN += ["sys.modules[__name__].C", "getattr(sys.modules[__name__], 'C')", "getattr(sys.modules[__name__], TEXT)"]
OWN += ["import_module(__name__).C", "globals()[TEXT]", "'{C}'.format(**globals())", "'%(C)s' % globals()"]
OWN += ["[v for n, v in sorted(globals().items()) if n == 'C'][0]", "by_name('C')", "sys.modules['m'].C"]
OWN += ["[n for n in dir() if n == 'C'] and C", "operator.itemgetter('C')(globals())"]


@pytest.mark.parametrize("expression", OWN)
def test_a_name_of_the_module_itself(project, expression):
    text = "import operator, sys\nfrom importlib import import_module\nTEXT = 'C'\nC = '{}'\n"
    text += f"def by_name(name): return globals()[name]\nY = (1, {expression})\nSAME = object()\n"
    project.write_module("m", text.replace("{}", "one", 1))
    project.watch("m")
    m = project.load("m")
    same = m.SAME
    assert m.Y == (1, "one")
    project.write_module("m", text.replace("{}", "two", 1))
    project.reload()
    assert (m.Y, m.SAME is same) == ((1, "two"), True)


QUIET = ["logging.getLogger('k')", "getattr(k, 'D')", "importlib.import_module('k').D", "vars(k)['D']"]
QUIET += ["sys.modules['k'].D", "k.__dict__['D']", "globals()['E']", "{'k': 'C', 'C': 'k'}", "hasattr(k, 'F')"]


@pytest.mark.parametrize("expression", QUIET)
def test_what_reads_something_else_does_not_run_again(project, expression):
    text = f"import importlib, logging, sys, k\nE = 1\nT = {{'k': {expression}}}\nX = [object(), {expression}]"
    project.write(k="C = 1\nD = object()", u=text)
    project.watch("k", "u")
    u = project.load("u")
    u.T["more"] = 1
    first = u.X[0]
    project.write(k="C = 2\nD = object()")
    report = project.reload()
    assert "more" in u.T and u.X[0] is first
    assert report.stale == []


@pytest.mark.parametrize("statement", ["sys.modules['k']", "importlib.import_module('k')", "k"])
def test_a_name_for_a_module_is_like_an_import(project, statement):
    text = f"import importlib, sys, k\nm = {statement}\nX = [object(), m.D]\nY = [object(), m.C]"
    project.write(k="C = 1\nD = 1", u=text)
    project.watch("k", "u")
    u = project.load("u")
    first, second = u.X[0], u.Y[0]
    project.write(k="C = 2\nD = 1")
    project.reload()
    assert (u.X[0] is first, u.Y[0] is second, u.Y[1]) == (True, False, 2)


def test_a_module_that_only_names_another_takes_no_part(project):
    project.write(k="C = 1", u="import logging\nlog = logging.getLogger('k')\nSEEN = {}\nSEEN[1] = 'C'")
    project.watch("k", "u")
    project.load("k")
    u = project.load("u")
    u.SEEN[2] = 1
    project.write(k="C = 2")
    assert [m.name for m in project.reload().modules] == ["k"]
    assert len(u.SEEN) == 2
