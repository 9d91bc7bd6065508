"""A reload calls no method of the objects that a program holds: whatever they answer, and whatever that does."""

from __future__ import annotations

import traceback

import pytest

CALLS: list[str] = []
"""What was called of hostile objects, and from where."""

HOSTILE = '''
import builtins, functools, types

def _trip(name):
    def method(*args, **options):
        builtins.tripped(name)
        raise RuntimeError(name + " was called")
    return method

NAMES = """__eq__ __ne__ __bool__ __repr__ __str__ __len__ __iter__ __contains__ __getattr__ __getattribute__ __call__
__get__ __format__ __lt__ __dir__ __reduce_ex__ __getitem__ __instancecheck__ __subclasscheck__ __int__
__index__ __setattr__ __delattr__ __copy__ __deepcopy__ __sizeof__ __array__ __next__""".split()

class Silent(type):
    """Classes that answer nothing either."""
    __eq__ = _trip("class __eq__")
    __hash__ = type.__hash__
    __bool__ = _trip("class __bool__")
    __len__ = _trip("class __len__")
    __iter__ = _trip("class __iter__")
    __repr__ = _trip("class __repr__")
    __instancecheck__ = _trip("__instancecheck__")
    __subclasscheck__ = _trip("__subclasscheck__")
    __getattr__ = _trip("class __getattr__")

def _members(kind):
    found = {name: _trip(kind + " " + name) for name in NAMES if kind == "closed" or name != "__getattribute__"}
    found["__hash__"] = _trip(kind + " __hash__")
    found["__class__"] = property(_trip(kind + " __class__"))
    found["prop"] = property(_trip(kind + " property"))
    found["__wrapped__"] = property(_trip(kind + " __wrapped__"))
    return found

Open = type("Open", (), _members("open"))
Closed = type("Closed", (), _members("closed"))
Slots = type("Slots", (), {**_members("slots"), "__slots__": ("a", "b")})
Meta = Silent("Meta", (), {"x": 1})
Row = type("Row", (tuple,), _members("tuple"))
Table = type("Table", (dict,), _members("dict"))
List = type("List", (list,), _members("list"))
Text = type("Text", (str,), _members("str"))
Number = type("Number", (int,), _members("int"))
Set = type("Set", (set,), _members("set"))

def make():
    objects = [Open(), Closed(), Slots(), Meta, Row((1, 2)), Table(), List(), Text("x"), Number(3), Set()]
    dict.__setitem__(objects[5], "a", 1)
    list.append(objects[6], objects[0])
    return objects
'''

HOLDERS = """
import functools
from hostile import make
OBJECTS = make()
(o, c, s, K, row, table, items, text, number, members) = OBJECTS
TABLE = {"o": o, "c": c, "s": s, "K": K, "row": row, "list": [table, items], "number": number, "set": members}
LIST = [o, (c, s), {"k": [row, text]}]
TUPLE = (o, c, (s, K), number)
def defaults(a=o, b=c, *, k=s, m=(row, K), n=number, t=text): return 1
def annotated(a: o, b: c) -> s: return 1
def closure():
    x, y, z, t, n = o, c, s, text, number
    def inner(): return (x, y, z, t, n, 1)
    return inner
held = closure()
def attributes(): return 1
attributes.o, attributes.c, attributes.s, attributes.text, attributes.number = o, c, s, text, number
class A:
    o, c, s, K, row, text, number = o, c, s, K, row, text, number
    TABLE = {"o": o, "n": number}
    def m(self, x=o, y=number): return 1
    p = property(lambda self: 1)
class B(A):
    __slots__ = ("u", "v")
    def __init__(self): self.u, self.v, self.w = o, c, number
instances = [A(), B()]
instances[0].o, instances[0].c, instances[0].number = o, c, number
part = functools.partial(attributes, o, c, k=s, n=number)
def deco(f):
    @functools.wraps(f)
    def wrapper(*args, state=[o, c, number]): return f()
    wrapper.held = (o, c, text)
    return wrapper
@deco
def decorated(): return 1
@functools.lru_cache
def cached(): return 1
cached.o = o
VALUE = 1
def user(): return VALUE, o
"""

EDITS = [
    ("return 1", "return 2"),
    ("VALUE = 1", "VALUE = 2"),
    ("class A:\n", "class A:\n    extra = 1\n"),
    ("    o, c, s, K, row, text, number = o, c, s, K, row, text, number\n", "    o = o\n"),
    ("def inner(): return (x, y, z, t, n, 1)", "def inner(): return (x, y, 2)"),
    ("OBJECTS = make()", "OBJECTS = make() + []"),
    ("held = closure()", "held = closure() or 1"),
    ('LIST = [o, (c, s), {"k": [row, text]}]', "LIST = [c, o]"),
    ('TABLE = {"o": o, "c": c,', 'TABLE = {"c": c, "o": c,'),
    ("TUPLE = (o, c, (s, K), number)", "TUPLE = (o, c, (s, K), number, 1)"),
    ("def defaults(a=o, b=c,", "def defaults(a=c, b=o,"),
    ("attributes.o, attributes.c, attributes.s", "attributes.o, attributes.cc, attributes.s"),
    ("part = functools.partial(attributes, o,", "part = functools.partial(attributes, c,"),
    ("class B(A):\n    __slots__ = ('u', 'v')", "class B(A):\n    __slots__ = ('u', 'v', 'x')"),
    ("state=[o, c, number]", "state=[c, o, text]"),
    ("@deco\ndef decorated", "def decorated"),
    ("@functools.lru_cache\n", "@functools.lru_cache(7)\n"),
    ("class B(A):", "class C: pass\nclass B(A, C):"),
    ("(o, c, s, K,", "(c, o, s, K,"),
    ("def user(): return VALUE, o\n", ""),
]


@pytest.fixture
def tripwire(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()

    def tripped(name: str) -> None:
        places = [f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in traceback.extract_stack()]
        CALLS.append(f"{name} from {[p for p in places if 'hostile' not in p][-4:]}")

    monkeypatch.setattr("builtins.tripped", tripped, raising=False)


@pytest.mark.usefixtures("tripwire")
@pytest.mark.parametrize(("old", "new"), EDITS, ids=[old.split("\n")[0] for old, _ in EDITS])
def test_nothing_of_a_held_object_is_called(project, old, new):
    after = HOLDERS.replace(old, new)
    project.write(hostile=HOSTILE, m=HOLDERS, u="from m import *\nimport m\nALL = [m.o, m.TABLE, m.A]\nY = m.VALUE")
    project.watch("m", "u", watch=["hostile"])
    project.load("u")
    assert CALLS == []
    project.write_module("m", after)
    project.reloader.plan()
    assert CALLS == []
    transaction = project.reloader.reload()
    assert CALLS == []
    transaction.swap()
    transaction.swap()
    transaction.undo()
    assert CALLS == []
    project.write_module("m", after + "raise ValueError('stop')")
    with pytest.raises(Exception, match="stop"):
        project.reloader.reload()
    project.write_module("m", after)
    project.reload()
    project.write_module("m", HOLDERS)
    project.reload()
    project.write_module("hostile", HOSTILE + "def more(): return 1\n")
    project.reload("hostile")
    assert CALLS == []


KEYS = """
from hostile import make
class Key:
    def __init__(self, n): self.n = n
    def __hash__(self): return self.n
KEEP = make()
T = {1: KEEP[0]}
S = {2}
D = dict(a=1)
X = 1
"""


def arrays(name: str) -> str:
    if name == "numpy":
        return "import numpy as np\na, b = np.zeros(3), np.ones((2, 2))\n"
    return "import torch\na, b = torch.zeros(3), torch.ones(2, 2)\n"


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_arrays_whose_comparison_is_an_array(project, picture, library):
    pytest.importorskip(library)
    text = arrays(library) + (
        "T = {'a': a, 'l': [a, b], 'n': {'b': b}}\nL = [a, (b, a)]\nP = (a, b, 1)\n"
        "def f(x=a, *, y=b): return 1\nf.a = a\n"
        "class A:\n    a, t = a, (a, b)\n    def m(self, x=a): return 1\n"
        "class Box:\n    def __init__(self, v): self.v = v\nbox = Box(a)\n"
        "def mk():\n    v = a\n    def g(): return v, 1\n    return g\ng = mk()\nLIMIT = 1\nC = [a * LIMIT]\n"
    )
    project.write_module("m", text)
    project.watch("m")
    m = project.load("m")
    a, f, g = m.a, m.f, m.g
    before = picture({}, ["m"])
    for old, new in [
        ("return 1", "return 2"),
        ("LIMIT = 1", "LIMIT = 2"),
        ("T = {'a': a,", "T = {'a': b,"),
        ("def f(x=a, *, y=b)", "def f(x=b, *, y=a)"),
        ("a, t = a, (a, b)", "a, t = b, (b, a)"),
        ("P = (a, b, 1)", "P = (b, a, 1)"),
        ("box = Box(a)", "box = Box(b)"),
        ("v = a", "v = b"),
        ("(3)", "(4)"),
    ]:
        assert old in text
        project.write_module("m", text.replace(old, new))
        project.reloader.plan()
        transaction = project.reloader.reload()
        assert m.f is f
        transaction.undo()
        assert picture({}, ["m"]) == before
    assert (m.a is a, m.g is g) == (True, True)
