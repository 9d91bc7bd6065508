"""Edits of CuTe DSL functions, compiled with tensors that are not there for a device that is not there."""

from __future__ import annotations

import inspect
import struct
from typing import Any

import cutlass
import pytest
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor

from tokenspeed_reload import ReloadError

HELPER = """
def scale(x):
    return x * {0}
"""
KERNEL = """
import cutlass
import cutlass.cute as cute
from helpers import scale

@cute.kernel
def device(a: cute.Tensor):
    i, _, _ = cute.arch.thread_idx()
    a[i] = scale(a[i]) + {0}

@cute.jit
def host(a: cute.Tensor):
    device(a).launch(grid=(1, 1, 1), block=(32, 1, 1))
"""
CACHE = """
COMPILED = {}
def get(key, *args):
    if key not in COMPILED:
        COMPILED[key] = cute.compile(host, *args, options="--gpu-arch sm_90a --keep-ptx")
    return COMPILED[key]
"""


def tensor() -> Any:
    return make_fake_compact_tensor(cutlass.Float32, (32,))


def ptx(function: Any) -> str:
    return cute.compile(function, tensor(), options="--gpu-arch sm_90a --keep-ptx").__ptx__


def number(value: float) -> str:
    return "0f" + struct.pack(">f", value).hex().upper()


@pytest.fixture
def kern(project):
    project.write_module("helpers", HELPER.format("3.0"))
    project.write_module("kern", KERNEL.format("5.0") + CACHE)
    project.watch("helpers", "kern")
    return project.load("kern")


def test_an_edited_kernel_reaches_holders_and_is_traced_anew(project, kern):
    held, inner = kern.host, kern.device.__wrapped__
    assert number(5) in ptx(held)
    rewritten = inner.__code__
    project.write_module("kern", KERNEL.format("7.0") + CACHE)
    transaction = project.reloader.reload()
    assert kern.host is held and kern.device.__wrapped__ is inner
    text = ptx(held)
    assert number(7) in text and number(5) not in text
    for _ in range(2):
        transaction.swap()
        assert number(5) in ptx(held)
        transaction.swap()
        assert number(7) in ptx(held)
    transaction.undo()
    assert inner.__code__ is rewritten and number(5) in ptx(held)


def test_an_edited_host_function_and_helper(project, kern):
    assert number(3) in ptx(kern.host)
    project.write_module("helpers", HELPER.format("11.0"))
    project.reload()
    text = ptx(kern.host)
    assert number(11) in text and number(3) not in text
    project.write_module("kern", KERNEL.format("5.0").replace("block=(32", "block=(64") + CACHE)
    project.reload()
    assert ".reqntid 64" in ptx(kern.host)


def test_containers_of_compiled_functions_start_empty_and_objects_are_reported(project, kern):
    class Holder:
        pass

    holder = Holder()
    first = holder.compiled = kern.get("a", tensor())
    table = kern.COMPILED
    project.write_module("helpers", HELPER.format("11.0"))
    transaction = project.reloader.reload()
    assert kern.COMPILED is table and table == {}
    stale = [s for s in transaction.report.stale if "host" in s.definition]
    assert len(stale) == 1 and any("Holder" in place for place in stale[0].held_by)
    assert number(11) in kern.get("a", tensor()).__ptx__
    transaction.undo()
    assert kern.get("a", tensor()) is first


def test_moved_functions_trace_with_their_new_lines(project, kern):
    assert number(5) in ptx(kern.host)
    compiled = kern.get("a", tensor())
    project.write_module("kern", "# a line\n\n\n" + KERNEL.format("5.0") + CACHE)
    report = project.reload()
    inner = kern.device.__wrapped__
    assert inspect.getsource(inner).startswith("@cute.kernel\ndef device")
    assert [s.definition for s in report.stale] == [] and compiled is not None
    assert number(5) in ptx(kern.host)


def test_settings_follow_the_source(project, kern):
    assert "prefixed" not in ptx(kern.host)
    project.write_module("kern", KERNEL.format("5.0") + 'device.set_name_prefix("prefixed")\n' + CACHE)
    project.reload()
    assert "prefixed" in ptx(kern.host)
    project.write_module("kern", KERNEL.format("6.0") + CACHE)
    project.reload()
    text = ptx(kern.host)
    assert "prefixed" not in text and number(6) in text


def test_a_method_that_is_traced(project):
    text = """
    import cutlass.cute as cute

    class Op:
        def __init__(self, by): self.by = by
        @cute.kernel
        def device(self, a: cute.Tensor):
            i, _, _ = cute.arch.thread_idx()
            a[i] = a[i] {0} self.by
        @cute.jit
        def __call__(self, a: cute.Tensor):
            self.device(a).launch(grid=(1, 1, 1), block=(32, 1, 1))
    """
    project.write_module("kern", text.format("*"))
    project.watch("kern")
    op = project.load("kern").Op(7.0)
    assert "mul" in ptx(op)
    project.write_module("kern", text.format("+"))
    transaction = project.reloader.reload()
    assert "add.rn.f32" in ptx(op) or "add.f32" in ptx(op)
    transaction.undo()
    assert "mul" in ptx(op)


def test_a_function_that_a_factory_made(project):
    text = """
    import cutlass.cute as cute

    def make(by):
        @cute.kernel
        def device(a: cute.Tensor):
            i, _, _ = cute.arch.thread_idx()
            a[i] = a[i] * by + {0}
        @cute.jit
        def host(a: cute.Tensor):
            device(a).launch(grid=(1, 1, 1), block=(32, 1, 1))
        return host
    """
    project.write_module("kern", text.format("3.0"))
    project.watch("kern")
    made = project.load("kern").make(9.0)
    assert number(9) in ptx(made) and number(3) in ptx(made)
    project.write_module("kern", text.format("5.0"))
    transaction = project.reloader.reload()
    text = ptx(made)
    assert number(9) in text and number(5) in text and number(3) not in text
    transaction.undo()
    assert number(3) in ptx(made)


def test_a_failure_restores_the_rewritten_code(project, kern):
    ptx(kern.host)
    inner = kern.device.__wrapped__
    code, state = inner.__code__, dict(vars(inner))
    project.write_module("kern", KERNEL.format("7.0") + CACHE + "\nraise ValueError\n")
    with pytest.raises(ReloadError):
        project.reloader.reload()
    assert inner.__code__ is code and vars(inner) == state and number(5) in ptx(kern.host)
