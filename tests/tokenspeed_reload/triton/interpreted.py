"""Edits of kernels under TRITON_INTERPRET=1, where a kernel is a Python function that is rewritten on its first run."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import numpy as np
import pytest

from tokenspeed_reload import ReloadError

HEAD = "import triton\nimport triton.language as tl\n"


class Array:
    """A float32 array as an argument of an interpreted kernel, with what the interpreter asks of a tensor."""

    dtype = "float32"

    def __init__(self, values: Any) -> None:
        self.values = np.array(values, dtype=np.float32)

    def data_ptr(self) -> int:
        return self.values.ctypes.data

    def untyped_storage(self) -> Array:
        return self

    def cpu(self) -> Array:
        return self

    def new_empty(self, *size: int, device: str) -> Array:
        return Array([])

    def set_(self, storage: Array, *place: Any) -> None:
        self.values = storage.values

    def copy_(self, other: Array) -> None:
        self.values[:] = other.values

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.values.shape

    def stride(self) -> tuple[int, ...]:
        return (1,)


ADD = """
@triton.jit
def add(p, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p + o, tl.load(p + o) + {0})
"""
CALL = """
@triton.jit
def scale(x):
    y = x * {0}
    return y

@triton.jit
def call(p, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p + o, scale(tl.load(p + o)))
"""


def result(kernel: Any, *args: Any, **options: Any) -> float:
    """What a kernel makes of ones."""
    array = Array([1.0] * 4)
    kernel[(1,)](array, *args, **options)
    return float(array.values[0])


@pytest.fixture
def write(project):
    return lambda name, text: project.write_module(name, HEAD + textwrap.dedent(text))


def test_an_edited_body_reaches_holders(project, write):
    write("kern", ADD.format("1.0"))
    project.watch("kern")
    kern = project.load("kern")
    held, launch = kern.add, kern.add[(1,)]
    assert result(held, BLOCK=4) == 2
    write("kern", ADD.format("2.0"))
    transaction = project.reloader.reload()
    array = Array([1.0] * 4)
    launch(array, BLOCK=4)
    assert kern.add is held and result(held, BLOCK=4) == array.values[0] == 3
    for _ in range(3):
        transaction.swap()
        assert result(held, BLOCK=4) == 2
        transaction.swap()
        assert result(held, BLOCK=4) == 3
    transaction.undo()
    assert result(held, BLOCK=4) == 2


def test_an_edited_callee_is_used(project, write):
    write("kern", CALL.format("3.0"))
    project.watch("kern")
    kern = project.load("kern")
    assert result(kern.call, BLOCK=4) == 3
    rewritten = dict(type(kern.call).rewritten_fn)
    write("kern", CALL.format("5.0"))
    project.reload()
    assert result(kern.call, BLOCK=4) == 5
    assert type(kern.call).rewritten_fn[kern.call.fn] is rewritten[kern.call.fn]


def test_a_moved_kernel_is_rewritten_with_its_new_lines(project, write):
    write("kern", ADD.format("1.0"))
    project.watch("kern")
    kern = project.load("kern")
    held = kern.add
    assert result(held, BLOCK=4) == 2
    write("kern", "\n\n\n" + ADD.format("1.0"))
    project.reload()
    assert kern.add is held and result(held, BLOCK=4) == 2
    assert held.rewrite().__code__.co_firstlineno == 8
    assert inspect.getsource(held.fn).startswith("@triton.jit\ndef add")


def test_a_changed_signature(project, write):
    write("kern", ADD.format("1.0"))
    project.watch("kern")
    kernel = project.load("kern").add
    assert result(kernel, BLOCK=4) == 2
    write("kern", ADD.format("n").replace("(p, BLOCK", "(p, n, BLOCK"))
    project.reload()
    assert result(kernel, 7, BLOCK=4) == 8


def test_a_kernel_that_a_factory_made(project, write):
    body = "".join(f"    {line}\n" for line in ADD.splitlines())
    write("kern", f"def make():\n{body.format('1.0')}    return add\n")
    project.watch("kern")
    kern = project.load("kern")
    made = kern.make()
    assert result(made, BLOCK=4) == 2
    write("kern", f"def make():\n{body.format('2.0')}    return add\n")
    transaction = project.reloader.reload()
    assert result(made, BLOCK=4) == 3
    transaction.undo()
    assert result(made, BLOCK=4) == 2


def test_heuristics_and_the_autotuner(project, write):
    text = """
    @triton.autotune(configs=[triton.Config({{"BLOCK": 4}})], key=["n"])
    @triton.heuristics({{"EXTRA": lambda args: args["n"] + {0}}})
    @triton.jit
    def tuned(p, n, BLOCK: tl.constexpr, EXTRA: tl.constexpr):
        o = tl.arange(0, BLOCK)
        tl.store(p + o, tl.load(p + o) * {1} + EXTRA)
    """
    write("kern", text.format(0, "1.0"))
    project.watch("kern")
    kernel = project.load("kern").tuned
    assert result(kernel, 1) == 2
    write("kern", text.format(10, "1.0"))
    project.reload()
    assert result(kernel, 1) == 12
    write("kern", text.format(10, "4.0"))
    project.reload()
    assert result(kernel, 1) == 15


def test_a_failure_restores_what_was_rewritten(project, write):
    write("kern", ADD.format("1.0"))
    project.watch("kern")
    kern = project.load("kern")
    assert result(kern.add, BLOCK=4) == 2
    before = dict(type(kern.add).rewritten_fn)
    write("kern", ADD.format("2.0") + "\nraise ValueError\n")
    with pytest.raises(ReloadError):
        project.reloader.reload()
    assert type(kern.add).rewritten_fn == before and result(kern.add, BLOCK=4) == 2
