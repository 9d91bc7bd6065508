"""Edits of kernels compiled for sm_90: what compiles anew, what keeps its binaries, what an undo gives back."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import weakref

import pytest

from tokenspeed_reload import ReloadError

ADD = """
@triton.jit
def add(p, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p + o, tl.load(p + o) + {0})
"""
CALLER = """
from helpers import scale

@triton.jit
def call(p, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p + o, scale(tl.load(p + o)))

@triton.jit
def other(p, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p + o, 2.0)
"""
HELPER = """
@triton.jit
def scale(x):
    return x * {0}
"""


def constant(compiled) -> str:
    """The lines of the IR that tell two versions of a kernel apart."""
    return "\n".join(line for line in compiled.asm["ttir"].splitlines() if "constant" in line)


def test_an_edited_body_reaches_every_holder_with_one_compile(project, write, device, pointer):
    write("kern", ADD.format("1.0"))
    project.write_module("user", "from kern import add\nclass Layer:\n    def __init__(self): self.kernel = add")
    project.watch("kern", "user")
    user, kern = project.load("user"), project.load("kern")
    held, launch, layer = {"k": kern.add}, kern.add[(1,)], user.Layer()
    closure = (lambda kernel: lambda *args, **options: kernel[(1,)](*args, **options))(kern.add)
    before = device.run(kern.add, pointer(), BLOCK=64)
    assert device.fresh() == ["add"]
    write("kern", ADD.format("2.0"))
    report = project.reload()
    after = launch(pointer(), BLOCK=64)
    assert device.fresh() == ["add"]
    assert "2.000000e+00" in constant(after) and "1.000000e+00" in constant(before)
    assert held["k"] is user.add is kern.add is layer.kernel
    for kernel in (held["k"], user.add, layer.kernel):
        assert device.run(kernel, pointer(), BLOCK=64) is after
    assert closure(pointer(), BLOCK=64) is after
    assert device.fresh() == [] and report.stale == []


def test_an_edited_callee_compiles_its_callers_in_other_modules_and_nothing_else(project, write, device, pointer):
    write("helpers", HELPER.format("3.0"))
    write("kern", CALLER)
    project.watch("helpers", "kern")
    kern = project.load("kern")
    device.run(kern.call, pointer(), BLOCK=64), device.run(kern.other, pointer(), BLOCK=64)
    device.fresh()
    write("helpers", HELPER.format("5.0"))
    project.reload()
    kept = kern.other.device_caches
    assert "5.000000e+00" in constant(device.run(kern.call, pointer(), BLOCK=64))
    device.run(kern.other, pointer(), BLOCK=64)
    assert device.fresh() == ["call"] and kern.other.device_caches is kept


def test_a_callee_of_a_callee_and_one_that_is_not_inlined(project, write, device, pointer):
    middle = "from helpers import scale\n@triton.jit(noinline={0})\ndef middle(x):\n    return scale(x) + 1.0\n"
    write("helpers", HELPER.format("3.0"))
    write("mid", middle.format(True))
    write(
        "kern",
        CALLER.replace("helpers import scale", "mid import middle").replace(
            "scale(tl.load(p + o)", "middle(tl.load(p)"
        ),
    )
    project.watch("helpers", "mid", "kern")
    kern = project.load("kern")
    device.run(kern.call, pointer(), BLOCK=64), device.run(kern.other, pointer(), BLOCK=64)
    device.fresh()
    write("helpers", HELPER.format("7.0"))
    project.reload()
    assert "7.000000e+00" in device.run(kern.call, pointer(), BLOCK=64).asm["ttir"]
    assert device.fresh() == ["call"]
    write("mid", middle.format(False))
    project.reload()
    device.run(kern.call, pointer(), BLOCK=64), device.run(kern.other, pointer(), BLOCK=64)
    assert device.fresh() == ["call"]


@pytest.mark.parametrize("reference", ["SCALE", "consts.SCALE", "consts.Table.SCALE"])
def test_a_constexpr_global_compiles_the_kernels_that_read_it(project, write, device, pointer, reference):
    consts = "SCALE = tl.constexpr({0})\nOTHER = tl.constexpr(1.0)\nclass Table:\n    SCALE = tl.constexpr({0})\n"
    write("consts", consts.format("3.0"))
    text = CALLER.replace("from helpers import scale", "import consts\nfrom consts import SCALE, OTHER")
    text = text.replace("scale(tl.load(p + o))", f"tl.load(p + o) * {reference}").replace("2.0", "OTHER")
    write("kern", text)
    project.watch("consts", "kern")
    kern = project.load("kern")
    device.run(kern.call, pointer(), BLOCK=64), device.run(kern.other, pointer(), BLOCK=64)
    device.fresh()
    for value in ("5.0", "7.0", "3.0"):
        write("consts", consts.format(value))
        project.reload()
        compiled = device.run(kern.call, pointer(), BLOCK=64)
        device.run(kern.other, pointer(), BLOCK=64)
        assert f"{float(value):e}" in constant(compiled)
        assert device.fresh() in (["call"], [] if value == "3.0" else ["call"])


def test_moved_kernels_keep_their_binaries_and_show_their_new_lines(project, write, device, pointer):
    write("kern", ADD.format("1.0"))
    project.watch("kern")
    kern = project.load("kern")
    kernel = kern.add
    before = device.run(kernel, pointer(), BLOCK=64)
    caches, table = kernel.device_caches, {kernel: "here"}
    device.fresh()
    write("kern", "# a line\nX = 1\n\n" + ADD.format("1.0"))
    report = project.reload()
    assert kern.add is kernel and kernel.device_caches is caches and table[kernel] == "here"
    assert device.run(kernel, pointer(), BLOCK=64) is before and device.fresh() == []
    assert inspect.getsource(kernel.fn).startswith("@triton.jit\ndef add")
    assert kernel.fn.__code__.co_firstlineno == 7 and report.objects_patched == 1


def test_a_moved_kernel_that_never_compiled_takes_its_new_lines(project, write, device, pointer):
    write("kern", ADD.format("1.0"))
    project.watch("kern")
    kern = project.load("kern")
    write("kern", "# a line\n\n" + ADD.format("1.0"))
    project.reload()
    assert kern.add.starting_line_number == 6
    assert "kern.py:7" in kern.add.warmup(pointer(), BLOCK=64, grid=(1,)).asm["ttir"] or device.fresh() == ["add"]


def test_undo_gives_back_the_very_binaries(project, write, device, pointer):
    write("helpers", HELPER.format("3.0"))
    write("kern", CALLER)
    project.watch("helpers", "kern")
    kern, helpers = project.load("kern"), project.load("helpers")
    first = device.run(kern.call, pointer(), BLOCK=64)
    state, inner = dict(vars(kern.call)), dict(vars(helpers.scale))
    table, names = {kern.call: 1, (helpers.scale, 2): 3}, {kern.call, helpers.scale}
    device.fresh()
    write("helpers", HELPER.format("5.0"))
    write("kern", CALLER.replace("tl.load(p + o)", "tl.load(p + o) + 1.0"))
    transaction = project.reloader.reload()
    second = device.run(kern.call, pointer(), BLOCK=64)
    assert device.fresh() == ["call"] and second is not first
    for _ in range(3):
        transaction.swap()
        assert device.run(kern.call, pointer(), BLOCK=64) is first
        assert (table[kern.call], table[helpers.scale, 2]) == (1, 3) and names == {kern.call, helpers.scale}
        transaction.swap()
        assert device.run(kern.call, pointer(), BLOCK=64) is second
        assert (table[kern.call], table[helpers.scale, 2]) == (1, 3) and names == {kern.call, helpers.scale}
    transaction.undo()
    assert device.run(kern.call, pointer(), BLOCK=64) is first and device.fresh() == []
    for now, before in ((vars(kern.call), state), (vars(helpers.scale), inner)):
        assert list(now) == list(before) and all(now[name] is before[name] for name in before)
    assert table[kern.call] == 1 and table[helpers.scale, 2] == 3


def test_a_kernel_that_first_compiled_after_a_reload_is_not_stale_after_its_undo(project, write, device, pointer):
    write("helpers", HELPER.format("3.0"))
    write("kern", CALLER)
    project.watch("helpers", "kern")
    kern = project.load("kern")
    write("helpers", HELPER.format("5.0"))
    transaction = project.reloader.reload()
    assert "5.000000e+00" in constant(device.run(kern.call, pointer(), BLOCK=64))
    transaction.undo()
    assert "3.000000e+00" in constant(device.run(kern.call, pointer(), BLOCK=64))


def test_a_kernel_made_after_a_reload_is_not_stale_after_its_undo(project, write, device, pointer):
    write("helpers", HELPER.format("3.0"))
    factory = "def make():\n" + "".join(f"    {line}\n" for line in CALLER.splitlines()[3:7]) + "    return call\n"
    write("kern", "from helpers import scale\n" + factory)
    project.watch("helpers", "kern")
    kern = project.load("kern")
    write("helpers", HELPER.format("5.0"))
    transaction = project.reloader.reload()
    made = kern.make()
    table = {made: 1}
    assert "5.000000e+00" in constant(device.run(made, pointer(), BLOCK=64))
    transaction.undo()
    assert "3.000000e+00" in constant(device.run(made, pointer(), BLOCK=64)) and table[made] == 1


def test_a_failure_in_a_later_module_restores_kernels_and_the_table_of_kernels(project, write, device, pointer):
    write("kern", ADD.format("1.0"))
    project.write_module("late", "import kern\nX = 1")
    project.watch("kern", "late")
    kern = project.load("kern")
    project.load("late")
    first = device.run(kern.add, pointer(), BLOCK=64)
    registry = dict(getattr(sys.modules["triton.runtime.jit"], "_triton_jit_function_registry", {}))
    table = {kern.add: 1}
    write("kern", ADD.format("2.0") + ADD.format("3.0").replace("def add", "def more"))
    project.write_module("late", "import kern\nX = 1 / 0")
    with pytest.raises(ReloadError):
        project.reloader.reload()
    device.fresh()
    assert device.run(kern.add, pointer(), BLOCK=64) is first and device.fresh() == [] and table[kern.add] == 1
    assert registry == getattr(sys.modules["triton.runtime.jit"], "_triton_jit_function_registry", {})


def test_signatures_change_in_place(project, write, device, pointer):
    write("kern", ADD.format("1.0"))
    project.watch("kern")
    kernel = project.load("kern").add
    device.run(kernel, pointer(), BLOCK=64)
    write("kern", ADD.format("n").replace("(p, BLOCK", "(p, n, BLOCK"))
    project.reload()
    assert "%n" in device.run(kernel, pointer(), 3, BLOCK=64).asm["ttir"]
    write("kern", ADD.format("n").replace("(p, BLOCK", "(p, n: tl.constexpr, BLOCK"))
    project.reload()
    assert "%n" not in device.run(kernel, pointer(), 3, BLOCK=64).asm["ttir"]
    device.fresh()
    write("kern", ADD.format("n").replace("(p, BLOCK", "(p, n, BLOCK"))
    project.reload()
    device.run(kernel, pointer(), 16, BLOCK=64), device.run(kernel, pointer(), 3, BLOCK=64)
    assert len(device.fresh()) >= 1
    text = ADD.format("n").replace("(p, BLOCK", "(p, n, BLOCK").replace("jit", 'jit(do_not_specialize=["n"])')
    write("kern", text)
    project.reload()
    compiled = {device.run(kernel, pointer(), n, BLOCK=64).hash for n in (1, 3, 16)}
    assert len(compiled) == 1
    assert [p.do_not_specialize for p in kernel.params] == [False, True, False]


def test_a_default_that_comes_from_an_edited_constant(project, write, device, pointer):
    text = "SIZE = {0}\n" + ADD.format("1.0").replace("BLOCK: tl.constexpr", "BLOCK: tl.constexpr = SIZE")
    write("kern", text.format(64))
    project.watch("kern")
    kernel = project.load("kern").add
    assert "tensor<64x" in device.run(kernel, pointer()).asm["ttir"]
    write("kern", text.format(128))
    project.reload()
    assert "tensor<128x" in device.run(kernel, pointer()).asm["ttir"]


TUNED = """
@triton.autotune(configs=[{configs}], key=["n"])
@triton.heuristics({{"EVEN": lambda args: args["n"] % {even} == 0}})
@triton.jit
def tuned(p, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p + o, tl.load(p + o) + {value}, mask=(o < n) | EVEN)
"""


def configs(*blocks: int) -> str:
    return ", ".join(f'triton.Config({{"BLOCK": {block}}}, num_warps=1)' for block in blocks)


def tune(kernel, choices: dict[int, int], dtype: str = "float32") -> None:
    for n, block in choices.items():
        kernel.cache[n, dtype] = next(c for c in kernel.configs if c.kwargs["BLOCK"] == block)


def test_tactics_stay_when_only_the_kernel_changed_and_go_with_their_configuration(project, write, device, pointer):
    write("kern", TUNED.format(configs=configs(32, 64), even=2, value="1.0"))
    project.watch("kern")
    kernel = project.load("kern").tuned
    inner = kernel.fn.fn
    tune(kernel, {7: 32, 9: 64})
    assert "tensor<64x" in device.run(kernel, pointer(), 9).asm["ttir"]
    cache = kernel.cache
    write("kern", TUNED.format(configs=configs(32, 64), even=2, value="2.0"))
    transaction = project.reloader.reload()
    assert project.load("kern").tuned is kernel and kernel.fn.fn is inner
    assert {key: c.kwargs["BLOCK"] for key, c in kernel.cache.items()} == {(7, "float32"): 32, (9, "float32"): 64}
    assert "2.000000e+00" in constant(device.run(kernel, pointer(), 9))
    transaction.undo()
    assert kernel.cache is cache and len(cache) == 2
    write("kern", TUNED.format(configs=configs(32, 128), even=2, value="2.0"))
    report = project.reload()
    assert [(key, c.kwargs["BLOCK"]) for key, c in kernel.cache.items()] == [((7, "float32"), 32)]
    assert kernel.cache[7, "float32"] is kernel.configs[0]
    assert any("1 new configuration" in note for note in report.notes)


def test_an_edited_callee_keeps_the_tactics_of_its_callers(project, write, device, pointer):
    write("helpers", HELPER.format("3.0"))
    text = TUNED.format(configs=configs(32, 64), even=2, value="scale(1.0)")
    write("kern", "from helpers import scale\n" + text)
    project.watch("helpers", "kern")
    kernel = project.load("kern").tuned
    tune(kernel, {9: 64})
    device.run(kernel, pointer(), 9)
    device.fresh()
    cache, entries = kernel.cache, dict(kernel.cache)
    write("helpers", HELPER.format("5.0"))
    transaction = project.reloader.reload()
    device.run(kernel, pointer(), 9)
    assert device.fresh() == ["tuned"] and list(kernel.cache) == list(entries)
    tune(kernel, {11: 32})
    transaction.undo()
    assert kernel.cache is cache and cache == entries


def test_edited_heuristics_are_used_and_the_order_of_the_stack_may_change(project, write, device, pointer):
    text = TUNED.format(configs=configs(32, 64), even=2, value="1.0")
    write("kern", text)
    project.watch("kern")
    kern = project.load("kern")
    kernel, inner = kern.tuned, kern.tuned.fn.fn
    table = {kernel: "outer", inner: "inner"}
    tune(kernel, {8: 64})
    assert "cmpi" not in device.run(kernel, pointer(), 8).asm["ttir"]
    write("kern", text.replace("% 2", "% 3"))
    project.reload()
    assert "cmpi" in device.run(kernel, pointer(), 8).asm["ttir"]
    lines = text.splitlines()
    lines[1:3] = reversed(lines[1:3])
    write("kern", "\n".join(lines))
    transaction = project.reloader.reload()
    assert type(kernel).__name__ == "Heuristics" and type(kernel.fn).__name__ == "Autotuner"
    assert kern.tuned is kernel and kernel.fn.fn is inner and [c.kwargs["BLOCK"] for c in kernel.fn.cache.values()]
    assert "tensor<64x" in device.run(kernel, pointer(), 8).asm["ttir"]
    assert table == {kernel: "outer", inner: "inner"}
    transaction.undo()
    assert type(kernel).__name__ == "Autotuner" and table == {kernel: "outer", inner: "inner"}
    assert "cmpi" in device.run(kernel, pointer(), 8).asm["ttir"]


def test_decorators_come_and_go(project, write, device, pointer):
    plain = ADD.format("1.0").replace("def add(p, BLOCK", "def tuned(p, n, BLOCK")
    write("kern", plain)
    project.watch("kern")
    kern = project.load("kern")
    table, held, launch = {kern.tuned: 1}, [kern.tuned], kern.tuned[(1,)]
    first = device.run(kern.tuned, pointer(), 8, BLOCK=32)
    write("kern", TUNED.format(configs=configs(64), even=2, value="2.0"))
    transaction = project.reloader.reload()
    assert kern.tuned is held[0] and type(held[0]).__name__ == "Autotuner" and table[kern.tuned] == 1
    assert transaction.report.stale == []
    assert "tensor<64x" in launch(pointer(), 8).asm["ttir"]
    transaction.swap()
    assert table[kern.tuned] == 1 and launch(pointer(), 8, BLOCK=32) is held[0][(1,)](pointer(), 8, BLOCK=32) is first
    transaction.commit()
    held.append(kern.tuned.fn.fn)
    write("kern", plain)
    project.reload()
    assert kern.tuned is held[0] is held[1] and type(held[0]).__name__ == "JITFunction" and table[held[0]] == 1
    for kernel in held:
        compiled = device.run(kernel, pointer(), 8, BLOCK=32)
        assert "tensor<32x" in compiled.asm["ttir"] and "1.000000e+00" in constant(compiled)


def test_a_kernel_in_a_class_and_two_of_one_name(project, write, device, pointer):
    body = "".join(f"    {line}\n" for line in ADD.splitlines())
    text = f"class Ops:\n{body}\n{ADD}\nFIRST = add\n{ADD}"
    write("kern", text.format("1.0"))
    project.watch("kern")
    kern = project.load("kern")
    held, first, second = kern.Ops.add, kern.FIRST, kern.add
    for kernel in (held, first, second):
        device.run(kernel, pointer(), BLOCK=64)
    write("kern", text.format("1.0").replace("1.0", "4.0"))
    project.reload()
    assert held is kern.Ops.add and first is kern.FIRST and second is kern.add and first is not second
    for kernel in (held, first, second):
        assert "4.000000e+00" in constant(device.run(kernel, pointer(), BLOCK=64))


TABLES = """
def tuned(kernel):
    pick = triton.heuristics({{"BLOCK": lambda args: 64}})(kernel)
    return triton.autotune([triton.Config({{}}, num_warps=4)], key=[])(pick)

@triton.jit
def add(p, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p + o, tl.load(p + o) + {0})
FIRST = add
KERNELS = [add]
BY_NAME = {{"add": add}}
TUNED = {{"add": tuned(add)}}

@triton.jit
def add(p, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p + o, tl.load(p + o) - {0})
KERNELS.append(add)
BY_NAME["sub"] = add
PAIR = (FIRST, add)

class Ops:
    both = [FIRST, add]
    by_name = {{"add": FIRST, "sub": add}}
"""


def test_two_kernels_of_one_name_in_lists_and_dicts_and_under_an_autotuner(project, write, device, pointer):
    write("kern", TABLES.format("1.0"))
    project.watch("kern")
    kern = project.load("kern")
    first, second, tuner = kern.FIRST, kern.add, kern.TUNED["add"]

    def places() -> list[tuple[object, object]]:
        tables = [kern.PAIR, (kern.BY_NAME["add"], kern.BY_NAME["sub"]), tuple(kern.KERNELS), tuple(kern.Ops.both)]
        return [*tables, tuple(kern.Ops.by_name.values())]

    def texts() -> list[str]:
        return [device.run(kernel, pointer(), BLOCK=64).asm["ttir"] for kernel in (first, second)]

    before = texts()
    assert "addf" in before[0] and "subf" in before[1]
    write("kern", TABLES.format("3.0"))
    transaction = project.reloader.reload()
    assert all(pair == (first, second) for pair in places())
    assert kern.TUNED["add"] is tuner and tuner.fn.fn is first
    after = texts()
    assert "addf" in after[0] and "subf" in after[1] and "3.000000e+00" in after[0] and "3.000000e+00" in after[1]
    transaction.swap()
    assert texts() == before
    transaction.swap()
    transaction.commit()
    assert texts() == after and transaction.report.stale == []


FACTORY = """
def make(size):
    SIZE = tl.constexpr(size)

    @triton.jit
    def made(p):
        o = tl.arange(0, SIZE)
        tl.store(p + o, tl.load(p + o) + {0})

    return made

SMALL = make(16)
"""


def test_kernels_that_a_factory_made(project, write, device, pointer):
    write("kern", FACTORY.format("1.0"))
    project.watch("kern")
    kern = project.load("kern")
    small, large = kern.SMALL, kern.make(256)
    assert "tensor<256x" in device.run(large, pointer()).asm["ttir"]
    device.run(small, pointer())
    write("kern", FACTORY.format("2.0"))
    transaction = project.reloader.reload()
    for kernel, size in ((small, 16), (large, 256)):
        compiled = device.run(kernel, pointer())
        assert f"tensor<{size}x" in compiled.asm["ttir"] and "2.000000e+00" in constant(compiled)
    transaction.undo()
    for kernel in (small, large):
        assert "1.000000e+00" in constant(device.run(kernel, pointer()))


def test_an_assigned_kernel_and_a_kernel_bound_to_another_one(project, write, device, pointer):
    text = (
        "def body(p):\n    o = tl.arange(0, 64)\n    tl.store(p + o, tl.load(p + o) + {0})\nkernel = triton.jit(body)\n"
    )
    write("kern", text.format("1.0"))
    project.watch("kern")
    kern = project.load("kern")
    kernel = kern.kernel
    device.run(kernel, pointer())
    write("kern", text.format("2.0"))
    project.reload()
    assert kern.kernel is kernel and "2.000000e+00" in constant(device.run(kernel, pointer()))


def test_a_name_that_stands_for_another_callee(project, write, device, pointer):
    write("helpers", HELPER.format("3.0") + HELPER.format("9.0").replace("def scale", "def other_scale"))
    write("kern", CALLER)
    project.watch("helpers", "kern")
    kern = project.load("kern")
    device.run(kern.call, pointer(), BLOCK=64), device.run(kern.other, pointer(), BLOCK=64)
    device.fresh()
    write("kern", CALLER.replace("import scale", "import other_scale as scale"))
    project.reload()
    assert "9.000000e+00" in constant(device.run(kern.call, pointer(), BLOCK=64))
    device.run(kern.other, pointer(), BLOCK=64)
    assert device.fresh() == ["call"]


def test_a_kernel_given_as_an_argument(project, write, device, pointer):
    write("helpers", HELPER.format("3.0"))
    text = CALLER.replace("from helpers import scale\n", "").replace("(p, BLOCK", "(p, scale: tl.constexpr, BLOCK", 1)
    write("kern", text)
    project.watch("helpers", "kern")
    kern, helpers = project.load("kern"), project.load("helpers")
    device.run(kern.call, pointer(), helpers.scale, BLOCK=64)
    write("helpers", HELPER.format("5.0"))
    project.reload()
    assert "5.000000e+00" in constant(device.run(kern.call, pointer(), helpers.scale, BLOCK=64))


def test_constexpr_functions(project, write, device, pointer):
    helper = "@triton.constexpr_function\ndef scale(x):\n    return x * {0}\n"
    write("helpers", helper.format(3))
    write("kern", CALLER.replace("scale(tl.load(p + o))", "tl.load(p + o) + scale(BLOCK)"))
    project.watch("helpers", "kern")
    kern, helpers = project.load("kern"), project.load("helpers")
    held = helpers.scale
    device.run(kern.call, pointer(), BLOCK=64), device.run(kern.other, pointer(), BLOCK=64)
    device.fresh()
    write("helpers", helper.format(5))
    project.reload()
    assert held is helpers.scale and held(2) == 10
    assert "3.200000e+02" in constant(device.run(kern.call, pointer(), BLOCK=64))
    device.run(kern.other, pointer(), BLOCK=64)
    assert device.fresh() == ["call"]


def test_triton_becomes_gluon(project, write, device, pointer):
    text = (
        "from triton.experimental import gluon\nfrom triton.experimental.gluon import language as gl\n"
        + """
@{0}.jit
def add(p):
    tl.store(p, 1.0)
"""
    )
    write("kern", text.format("triton"))
    project.watch("kern")
    kern = project.load("kern")
    kernel, table = kern.add, {kern.add: 1}
    device.run(kernel, pointer())
    write("kern", text.format("gluon").replace("tl.store", "gl.store"))
    transaction = project.reloader.reload()
    assert kern.add is kernel and kernel.is_gluon() and table[kernel] == 1
    assert device.run(kernel, pointer()).src.language.name == "GLUON"
    transaction.undo()
    assert not kernel.is_gluon() and device.run(kernel, pointer()).src.language.name == "TRITON"


GLUON = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LAYOUT = gl.constexpr(gl.BlockedLayout([{0}], [32], [4], [0]))

@gluon.jit
def scale(x):
    return x * {1}

@gluon.jit
def add(p):
    o = gl.arange(0, 256, layout=LAYOUT)
    gl.store(p + o, scale(gl.load(p + o)))
"""


def test_gluon_kernels_callees_and_layouts(project, write, device, pointer):
    write("kern", GLUON.format(1, "2.0"))
    project.watch("kern")
    kernel = project.load("kern").add
    first = device.run(kernel, pointer())
    write("kern", GLUON.format(1, "3.0"))
    project.reload()
    assert "3.000000e+00" in device.run(kernel, pointer()).asm["ttgir"]
    write("kern", GLUON.format(2, "3.0"))
    project.reload()
    assert "sizePerThread = [2]" in device.run(kernel, pointer()).asm["ttgir"]
    assert "sizePerThread = [1]" in first.asm["ttgir"]


HOOK = "def hook(*args, **options): CALLS.append({0})\nCALLS = [0]\nadd.add_pre_run_hook(hook)\n"


def test_hooks_from_outside_stay(project, write, device, pointer):
    write(
        "kern",
        ADD.format("1.0") + "def hook(*args, **options): CALLS.append(1)\nCALLS = [0]\nadd.add_pre_run_hook(hook)\n",
    )
    project.watch("kern")
    kern = project.load("kern")
    calls: list[int] = []
    kern.add.add_pre_run_hook(lambda *args, **options: calls.append(1))
    write(
        "kern",
        ADD.format("2.0") + "def hook(*args, **options): CALLS.append(2)\nCALLS = [0]\nadd.add_pre_run_hook(hook)\n",
    )
    project.reload()
    device.run(kern.add, pointer(), BLOCK=64)
    assert (kern.CALLS, calls) == ([0, 2], [1])


def test_what_stands_in_front_of_triton_goes_with_the_reload(project, write, device, pointer):
    """Listeners and hooks that were set from outside, and Triton's own compile."""
    import triton

    def outer(*args, **options):
        return None

    hooks = {name: getattr(triton.knobs.runtime, name) for name in ("jit_cache_hook", "jit_post_compile_hook")}
    for name in hooks:
        setattr(triton.knobs.runtime, name, outer)
    listener, compiles = triton.knobs.compilation.listener, vars(triton.runtime.jit.JITFunction).get("_do_compile")

    def check():
        assert triton.knobs.compilation.listener is listener
        assert all(getattr(triton.knobs.runtime, name) is outer for name in hooks)
        assert vars(triton.runtime.jit.JITFunction).get("_do_compile") is compiles

    try:
        write("kern", ADD.format("1.0"))
        project.watch("kern")
        kern = project.load("kern")
        device.run(kern.add, pointer(), BLOCK=64)
        write("kern", ADD.format("2.0"))
        transaction = project.reloader.reload()
        check()
        transaction.swap()
        check()
        transaction.undo()
        check()
        write("kern", ADD.format("2.0") + "raise ValueError\n")
        with pytest.raises(ReloadError):
            project.reloader.reload()
        check()
    finally:
        for name, hook in hooks.items():
            setattr(triton.knobs.runtime, name, hook)


def test_a_reload_without_an_edit_touches_no_kernel(project, write, device, pointer):
    write("helpers", HELPER.format("3.0"))
    write("kern", CALLER)
    project.watch("helpers", "kern")
    kern = project.load("kern")
    device.run(kern.call, pointer(), BLOCK=64)
    state = dict(vars(kern.call))
    assert project.reload("helpers", "kern").objects_patched == 0
    assert all(vars(kern.call)[name] is value for name, value in state.items())
    device.fresh()
    device.run(kern.call, pointer(), BLOCK=64)
    assert device.fresh() == []
    # A named reload of a module runs what it must, and still keeps what did not change.
    write("kern", CALLER + "\nX = 1\n")
    project.reload()
    device.run(kern.call, pointer(), BLOCK=64)
    assert device.fresh() == []


def test_a_broken_kernel_reloads_and_fails_when_it_compiles(project, write, device, pointer):
    write("kern", ADD.format("1.0"))
    project.watch("kern")
    kern = project.load("kern")
    first = device.run(kern.add, pointer(), BLOCK=64)
    write("kern", ADD.format("no_such_name(1)"))
    transaction = project.reloader.reload()
    with pytest.raises(Exception, match="no_such_name"):
        device.run(kern.add, pointer(), BLOCK=64)
    transaction.undo()
    assert device.run(kern.add, pointer(), BLOCK=64) is first


def test_the_disk_is_not_read_when_a_kernel_compiles_later(project, write, device, pointer):
    write("kern", ADD.format("1.0"))
    project.watch("kern")
    kern = project.load("kern")
    write("kern", "\n\n" + ADD.format("8.0"))
    assert "1.000000e+00" in constant(device.run(kern.add, pointer(), BLOCK=64))
    project.reload()
    assert "8.000000e+00" in constant(device.run(kern.add, pointer(), BLOCK=64))


def test_kernels_leave_nothing_behind(project, write, device, pointer):
    from triton.runtime.jit import JITFunction

    write("kern", ADD.format("1.0"))
    project.watch("kern")
    kern = project.load("kern")

    def count() -> int:
        gc.collect()
        kernels = [o for o in gc.get_objects() if type(o) is JITFunction]
        return sum(k.fn.__code__.co_filename.startswith(str(project.root)) for k in kernels)

    for value in range(1, 8):
        write("kern", ADD.format(f"{value}.0"))
        transaction = project.reloader.reload()
        device.run(kern.add, pointer(), BLOCK=64)
        transaction.undo() if value % 2 else transaction.commit()
    del transaction
    assert count() == 1


def test_a_kernel_that_moves_to_another_module(project, write, device, pointer):
    project.write_module("pkg.__init__", "")
    write("pkg.kern", ADD.format("1.0"))
    project.write_module("pkg.user", "from pkg.kern import add\nTABLE = {'add': add}")
    project.watch("pkg")
    user, kern = project.load("pkg.user"), project.load("pkg.kern")
    held = [kern.add]
    device.run(kern.add, pointer(), BLOCK=64)
    write("pkg.other", ADD.format("2.0"))
    project.write_module("pkg.kern", "from pkg.other import add")
    report = project.reload()
    assert user.add is kern.add is user.TABLE["add"]
    assert "2.000000e+00" in constant(device.run(user.add, pointer(), BLOCK=64))
    stale = held[0] is not kern.add
    assert not stale or "pkg.kern.add" in [s.definition for s in report.stale]


def test_a_kernel_that_is_renamed_or_removed_is_named_where_it_is_held(project, write, device, pointer):
    write("kern", ADD.format("1.0"))
    project.watch("kern")
    held = [project.load("kern").add]
    write("kern", ADD.format("2.0").replace("def add", "def plus"))
    report = project.reload()
    assert [s.definition for s in report.stale] == ["kern.add"]
    assert "1.000000e+00" in constant(device.run(held[0], pointer(), BLOCK=64))


def test_a_removed_callee_fails_as_in_a_fresh_process(project, write, device, pointer):
    write("helpers", HELPER.format("3.0"))
    write("kern", CALLER.replace("from helpers import scale", "import helpers").replace("scale(", "helpers.scale("))
    project.watch("helpers", "kern")
    kern = project.load("kern")
    first = device.run(kern.call, pointer(), BLOCK=64)
    write("helpers", "")
    transaction = project.reloader.reload()
    with pytest.raises(Exception, match="scale"):
        device.run(kern.call, pointer(), BLOCK=64)
    transaction.undo()
    assert device.run(kern.call, pointer(), BLOCK=64) is first


def test_a_plain_global_that_triton_leaves_out_of_its_key(project, write, device, pointer, monkeypatch):
    monkeypatch.setenv("TRITON_ALLOW_NON_CONSTEXPR_GLOBALS", "1")
    text = "SCALE = {0}\n" + ADD.format("SCALE")
    write("kern", text.format("3.0"))
    project.watch("kern")
    kern = project.load("kern")
    for value in ("3.0", "5.0", "3.0", "7.0"):
        write("kern", text.format(value))
        project.reload()
        assert f"{float(value):e}" in constant(device.run(kern.add, pointer(), BLOCK=64))


def test_a_kernel_under_a_condition_and_in_a_try_block(project, write, device, pointer):
    body = "".join(f"    {line}\n" for line in ADD.splitlines())
    text = f"try:\n    import triton\n{body}except ImportError:\n    add = None\nif add is not None:\n{body}"
    write("kern", text.replace("{0}", "1.0"))
    project.watch("kern")
    kern = project.load("kern")
    held = kern.add
    device.run(held, pointer(), BLOCK=64)
    write("kern", text.replace("{0}", "6.0"))
    report = project.reload()
    assert "6.000000e+00" in constant(device.run(kern.add, pointer(), BLOCK=64))
    assert held is kern.add or report.stale


def test_a_bound_run_method_and_partial_objects_follow(project, write, device, pointer):
    write("kern", ADD.format("1.0"))
    project.watch("kern")
    kern = project.load("kern")
    run, partial = kern.add.run, functools.partial(kern.add.run, grid=(1,), warmup=False)
    run(pointer(), BLOCK=64, grid=(1,), warmup=False)
    write("kern", ADD.format("2.0"))
    project.reload()
    assert "2.000000e+00" in constant(run(pointer(), BLOCK=64, grid=(1,), warmup=False))
    assert "2.000000e+00" in constant(partial(pointer(), BLOCK=64))


AGGREGATE = """
from triton.language.core import _aggregate

@_aggregate
class Pair:
    x: tl.tensor
    by: tl.constexpr

    @triton.constexpr_function
    def __init__(self, x, by):
        self.x = x
        self.by = tl.constexpr(by)

    @triton.jit
    def product(self):
        return self.x * self.by + {0}
"""


def test_aggregates(project, write, device, pointer):
    write("helpers", AGGREGATE.format("1.0"))
    text = CALLER.replace("import scale", "import Pair")
    text = text.replace("scale(tl.load(p + o))", "Pair(tl.load(p + o), 3.0).product()")
    write("kern", text)
    project.watch("helpers", "kern")
    kern = project.load("kern")
    device.run(kern.call, pointer(), BLOCK=64), device.run(kern.other, pointer(), BLOCK=64)
    device.fresh()
    write("helpers", AGGREGATE.format("9.0"))
    transaction = project.reloader.reload()
    assert "9.000000e+00" in constant(device.run(kern.call, pointer(), BLOCK=64))
    device.run(kern.other, pointer(), BLOCK=64)
    assert device.fresh() == ["call"]
    transaction.undo()
    assert "1.000000e+00" in constant(device.run(kern.call, pointer(), BLOCK=64))


def test_options_of_the_decorator(project, write, device, pointer):
    text = "def name(_): return '{0}'\n" + ADD.format("1.0").replace("@triton.jit", "@triton.jit(repr=name{1})")
    write("kern", text.format("first", ""))
    project.watch("kern")
    kernel = project.load("kern").add
    assert device.run(kernel, pointer(), BLOCK=64).name == "first"
    write("kern", text.format("second", ", debug=True"))
    project.reload()
    assert device.run(kernel, pointer(), BLOCK=64).name == "second" and kernel.debug is True


def test_the_keys_and_hooks_of_an_autotuner(project, write, device, pointer):
    text = TUNED.replace('key=["n"]', "key={keys}, pre_hook=hook").replace(
        "@triton.autotune", "CALLS = []\ndef hook(*args, **options): CALLS.append({value})\n@triton.autotune"
    )
    write("kern", text.format(configs=configs(32, 64), even=2, value="1.0", keys='["n"]'))
    project.watch("kern")
    kern = project.load("kern")
    kernel = kern.tuned
    tune(kernel, {9: 64})
    write("kern", text.format(configs=configs(32, 64), even=2, value="2.0", keys='["n", "EVEN"]'))
    project.reload()
    assert kernel.cache == {} and kernel.keys == ["n", "EVEN"]
    kernel.pre_hook({})
    assert kern.CALLS == [2.0]


def test_a_cached_function_that_is_given_a_kernel(project, write, device, pointer):
    write("kern", ADD.format("1.0"))
    project.write_module(
        "user", "import functools\n@functools.lru_cache(maxsize=2)\ndef source(kernel): return kernel.src\n"
    )
    project.watch("kern", "user")
    kern, user = project.load("kern"), project.load("user")
    assert "1.0" in user.source(kern.add)
    write("kern", ADD.format("2.0"))
    transaction = project.reloader.reload()
    for _ in range(4):
        assert "2.0" in user.source(kern.add)
    transaction.undo()
    assert "1.0" in user.source(kern.add)


def test_weak_dicts_keyed_by_kernels(project, write, device, pointer):
    write("kern", ADD.format("1.0"))
    project.watch("kern")
    kern = project.load("kern")
    table, names = weakref.WeakKeyDictionary({kern.add: 1}), weakref.WeakSet([kern.add])
    write("kern", ADD.format("2.0"))
    transaction = project.reloader.reload()
    assert table[kern.add] == 1 and kern.add in names
    transaction.undo()
    assert table[kern.add] == 1 and kern.add in names


def test_a_compile_in_the_middle_of_a_reload_is_stored_under_its_own_key(project, write, device, pointer):
    write("helpers", HELPER.format("3.0"))
    write("kern", CALLER)
    project.write_module("late", "import kern\nSOURCES = []\nkern.WARM(kern.call, SOURCES)\n")
    project.watch("helpers", "kern", "late")
    kern = project.load("kern")
    blocks = iter([16, 32, 64])

    def warm(kernel, sources):
        sources.append(constant(device.run(kernel, pointer(), BLOCK=next(blocks))))

    kern.WARM = warm
    late = project.load("late")
    assert "3.000000e+00" in late.SOURCES[0]
    write("helpers", HELPER.format("5.0"))
    project.write_module("late", "import kern\nSOURCES = []\nkern.WARM(kern.call, SOURCES)\nX = 1\n")
    transaction = project.reloader.reload()
    assert "5.000000e+00" in late.SOURCES[0]
    transaction.undo()
    assert "3.000000e+00" in constant(device.run(kern.call, pointer(), BLOCK=32))
    assert "_do_compile" in vars(type(kern.call)) and type(kern.call)._do_compile.__module__ == "triton.runtime.jit"


def bodies_after(project, write, device, pointer, old, new):
    """What the report says of an edit of a caller or its helper, both of which were compiled."""
    sources = {"helpers": HELPER.format("2.0"), "kern": CALLER}
    for name, text in sources.items():
        write(name, text)
    project.watch("kern", "helpers")
    kern = project.load("kern")
    for kernel in (kern.call, kern.other):
        device.run(kernel, pointer(), BLOCK=64)
    before = {name: getattr(kern, name).device_caches for name in ("call", "other")}
    for name, text in sources.items():
        if old in text:
            write(name, text.replace(old, new, 1))
    return project.reload().bodies, before


@pytest.mark.parametrize(
    ("old", "new", "changed"), [("x * 2.0", "x * 3.0", "call"), ("p + o, 2.0", "p + o, 3.0", "other")]
)
def test_an_edit_of_bodies_names_the_kernels_and_their_binaries(project, write, device, pointer, old, new, changed):
    bodies, before = bodies_after(project, write, device, pointer, old, new)
    assert not bodies.functions and not bodies.beyond
    compiled = {kernel.name: kernel.before["device_caches"] for kernel in bodies.kernels if kernel.before["hash"]}
    assert compiled.pop("helpers.scale", None) is None or changed == "call"
    assert compiled == {f"kern.{changed}": before[changed]}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@triton.jit\ndef other", "@triton.jit(noinline=True)\ndef other"),
        ("def other(p, BLOCK: tl.constexpr)", "def other(p, BLOCK: tl.constexpr = 64)"),
        ("def other(p, BLOCK: tl.constexpr)", "def other(p, WIDTH: tl.constexpr, BLOCK: tl.constexpr)"),
        ("from helpers import scale", "from helpers import scale\nSIZE: tl.constexpr = tl.constexpr(3)"),
    ],
)
def test_an_edit_of_what_launches_see_is_more_than_a_body(project, write, device, pointer, old, new):
    assert bodies_after(project, write, device, pointer, old, new)[0].beyond
