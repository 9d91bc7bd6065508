"""What a snapshot copies, what it shares, and what it refuses."""

from __future__ import annotations

import sys
from types import FunctionType

import pytest
import torch

from tokenspeed.runtime.execution.graphs.base import CaptureError
from tokenspeed.runtime.execution.graphs.snapshot import Snapshotter

from .conftest import ForwardPackage


def test_global_writes_stay_in_the_snapshot_and_are_seen_by_all_of_its_functions(forward: ForwardPackage) -> None:
    module = forward.load({"k": "n = 0\ndef add():\n    global n\n    n += 1\ndef kernel():\n    add()\n    return n"})[
        "k"
    ]
    kernel = Snapshotter([forward.name]).snapshot(module.kernel)
    assert [kernel(), kernel()] == [1, 2]
    assert module.n == 0


def test_snapshots_of_one_snapshotter_share_their_copies(forward: ForwardPackage) -> None:
    module = forward.load({"k": "def h(): ...\ndef a(): return h\ndef b(): return h\n"})["k"]
    snapshots = Snapshotter([forward.name])
    a, b = snapshots.snapshot(module.a), snapshots.snapshot(module.b)
    assert a() is b()
    assert a() is not module.h
    assert snapshots.snapshot(module.a) is a


def test_an_old_snapshotter_refuses_edited_code(forward: ForwardPackage) -> None:
    module = forward.load({"k": "def kernel(): return 1"})["k"]
    snapshots = Snapshotter([forward.name])
    snapshots.snapshot(module.kernel)
    forward.patch({"k": "def kernel(): return 2"})
    with pytest.raises(CaptureError, match="capture with a new backend object"):
        snapshots.snapshot(module.kernel)


def test_code_of_other_packages_and_tensors_are_shared(forward: ForwardPackage) -> None:
    module = forward.load(
        {"k": "import torch, json\nW = torch.ones(2)\ndef kernel(): return json, torch.nn.Linear, json.dumps, W"}
    )["k"]
    kernel = Snapshotter([forward.name]).snapshot(module.kernel)
    assert all(a is b for a, b in zip(kernel(), module.kernel(), strict=True))
    assert Snapshotter([forward.name]).snapshot(torch.nn.functional.silu) is torch.nn.functional.silu


def test_only_what_the_code_names_is_copied(forward: ForwardPackage) -> None:
    module = forward.load({"k": "A = [1]\nB = [2]\ndef kernel(): return A"})["k"]
    kernel = Snapshotter([forward.name]).snapshot(module.kernel)
    assert "A" in kernel.__globals__
    assert "B" not in kernel.__globals__


def test_cells_shared_by_two_functions_stay_shared(forward: ForwardPackage) -> None:
    source = """
def make():
    n = 0
    def add():
        nonlocal n
        n += 1
    def kernel():
        add()
        return n
    return kernel
kernel = make()
"""
    module = forward.load({"k": source})["k"]
    kernel = Snapshotter([forward.name]).snapshot(module.kernel)
    assert [kernel(), kernel()] == [1, 2]
    assert module.kernel() == 1


def test_live_instances_are_instances_for_the_snapshot(forward: ForwardPackage) -> None:
    source = (
        "class C: ...\nclass D: ...\ndef kernel(v): return isinstance(v, C), isinstance(v, (D, C)), isinstance(C(), C)"
    )
    module = forward.load({"k": source})["k"]
    kernel = Snapshotter([forward.name]).snapshot(module.kernel)
    assert kernel(module.C()) == (True, True, True)
    assert kernel(module.D()) == (False, True, True)
    assert kernel(3) == (False, False, True)


def test_enum_members_given_to_a_snapshot_are_its_own(forward: ForwardPackage) -> None:
    source = """
import enum
class E(enum.IntEnum):
    A = 1
    B = 2
    ALSO_A = 1
class F(enum.Flag):
    X = 1
    Y = 2
def kernel(e, f): return e is E.A, E.ALSO_A is E.A, f == F.X | F.Y, list(E)
"""
    module = forward.load({"k": source})["k"]
    snapshots = Snapshotter([forward.name])
    kernel = snapshots.snapshot(module.kernel)
    assert kernel(snapshots.pin(module.E.A), snapshots.pin(module.F.X | module.F.Y)) == (True, True, True, [1, 2])


def test_pinning_keeps_plain_values(forward: ForwardPackage) -> None:
    snapshots = Snapshotter([forward.name])
    for value in (3, "a", [1, 2], {"a": torch.ones(1)}, torch.float32, object()):
        assert snapshots.pin(value) is value


def test_dictionaries_keyed_by_objects_that_are_copied(forward: ForwardPackage) -> None:
    source = """
from dataclasses import dataclass
@dataclass(frozen=True)
class Inner:
    n: int
@dataclass(frozen=True)
class Key:
    inner: Inner
T = {Key(Inner(1)): 'one', Key(Inner(2)): 'two'}
S = {Key(Inner(3))}
def kernel(): return T[Key(Inner(2))], Key(Inner(3)) in S
"""
    module = forward.load({"k": source})["k"]
    assert Snapshotter([forward.name]).snapshot(module.kernel)() == ("two", True)


def test_a_call_graph_deeper_than_the_stack(forward: ForwardPackage) -> None:
    depth = 3 * sys.getrecursionlimit()
    lines = [f"def f{i}(): return f{i + 1}" for i in range(depth)]
    module = forward.load({"k": "\n".join([*lines, f"def f{depth}(): return 'end'"])})["k"]
    function = Snapshotter([forward.name]).snapshot(module.f0)
    for _ in range(depth):
        function = function()
        assert isinstance(function, FunctionType)
    assert function() == "end"


def test_an_import_that_runs_for_the_first_time_in_a_snapshot(forward: ForwardPackage) -> None:
    modules = forward.load({"k": "def kernel():\n    from .late import f\n    return f()"})
    (forward.directory / "late.py").write_text("def f(): return 1")
    kernel = Snapshotter([forward.name]).snapshot(modules["k"].kernel)
    assert kernel() == 1
    forward.patch({"late": "def f(): return 2"})
    assert kernel() == 1


def test_an_imported_module_that_was_deleted_since(forward: ForwardPackage) -> None:
    modules = forward.load({"h": "def f(): return 1", "k": "def kernel():\n    from . import h\n    return h.f()"})
    kernel = Snapshotter([forward.name]).snapshot(modules["k"].kernel)
    del sys.modules[f"{forward.name}.h"], sys.modules[forward.name].h  # type: ignore[attr-defined]
    assert kernel() == 1


def test_a_class_that_cannot_be_copied_is_named(forward: ForwardPackage) -> None:
    source = "from plainlib import Base\nclass C(Base, size=3): ...\ndef kernel(): return C()"
    (forward.directory.parent / "plainlib.py").write_text(
        "class Base:\n    def __init_subclass__(cls, *, size): cls.size = size"
    )
    module = forward.load({"k": source})["k"]
    with pytest.raises(CaptureError, match=r"the class fwd\d+\.k\.C, which cannot be copied"):
        Snapshotter([forward.name]).snapshot(module.kernel)


def test_attributes_of_a_copied_object_are_those_of_the_moment(forward: ForwardPackage) -> None:
    source = "class C:\n    def f(self): return self.n"
    module = forward.load({"k": source})["k"]
    value = module.C()
    value.n = 1
    method = Snapshotter([forward.name]).snapshot(value.f)
    value.n = 2
    assert method() == 1
