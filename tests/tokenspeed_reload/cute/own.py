"""The server's own kernels in CuTe DSL: that they compile for a device that is not there, and edits of them."""

from __future__ import annotations

import importlib.util
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from cutlass import cute

from tokenspeed.runtime.reload.fault import describe
from tokenspeed_kernel.jit import count_compiles, noted

BF16 = "torch.bfloat16"
LOOP = "for column in cutlass.range(thread, size, THREADS):"


@pytest.fixture
def norm(project: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file with the kernels, as a module of its own: the package around it needs torch."""
    monkeypatch.setattr(cute, "compile", cute.compile[cute.GPUArch("sm_90a"), cute.KeepPTX])
    monkeypatch.chdir(project.root)  # where the DSL writes what it keeps
    package = importlib.util.find_spec("tokenspeed_kernel")
    assert package is not None and package.origin is not None
    source = Path(package.origin).with_name("ops") / "norm" / "cute_kernels.py"
    project.write_module("own_norm", source.read_text(encoding="utf-8"))
    project.watch("own_norm")
    return project.load("own_norm")


def edit(project: Any, old: str, new: str) -> str:
    """Change the file, and return its text."""
    path = project.root / "own_norm.py"
    text = path.read_text(encoding="utf-8")
    assert old in text
    text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return text


def number(value: float) -> str:
    return "0f" + struct.pack(">f", value).hex().upper()


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("dtype", ["torch.float32", "torch.float16", BF16])
def test_it_compiles_for_hopper_once_a_type_and_is_counted(norm: Any, dtype: str, has_residual: bool) -> None:
    with count_compiles() as count:
        first = norm.compiled(dtype, dtype, has_residual)
        assert norm.compiled(dtype, dtype, has_residual) is first
    assert count.compiled == 1 and count.seconds > 0
    assert first in noted()
    text = first.__ptx__
    assert ".target sm_90a" in text
    # Sizes and strides are no constants, or each batch would compile one of its own.
    assert len(re.findall(r"^\s*\.param ", text, re.MULTILINE)) == 7
    if dtype != "torch.float32":
        # Rounded to the type before the weight is applied.
        kind = {BF16: "bf16", "torch.float16": "f16"}[dtype]
        assert f"cvt.rn.{kind}.f32" in text


def test_addresses_sizes_and_a_stream_are_what_a_launch_takes(norm: Any) -> None:
    function = norm.compiled(BF16, "torch.float32", True)
    pointers = [norm.pointer(kind, 4096) for kind in (BF16, BF16, "torch.float32", BF16, BF16)]
    packed, _ = function.execution_args.generate_execution_args((*pointers, 4, 8, 8, 8, 1e-6, norm.STREAM), {})
    assert len(packed) == 11


EDITS = {
    "the kernel": ("squares += wide * wide", "squares += wide * wide * 3.0", number(3)),
    "what it calls": ("whole += shared[index]", "whole += shared[index] * 3.0", number(3)),
    "a constant": ("THREADS = 256", "THREADS = 128", ".reqntid 128"),
}


@pytest.mark.parametrize("change", EDITS.values(), ids=EDITS)
def test_an_edit_empties_the_cache_and_is_compiled_at_the_next_launch(
    project: Any, norm: Any, change: tuple[str, str, str]
) -> None:
    old, new, sign = change
    first = norm.compiled(BF16, BF16, True)
    assert sign not in first.__ptx__
    edit(project, old, new)
    transaction = project.reloader.reload()
    with count_compiles() as count:
        after = norm.compiled(BF16, BF16, True)
    assert count.compiled == 1
    assert sign in after.__ptx__
    transaction.undo()
    assert norm.compiled(BF16, BF16, True) is first


BROKEN = {
    "a name in a loop": ("squares += wide * wide", "squares += wide * no_such_name", "no_such_name"),
    "an attribute": ("cute.math.rsqrt(", "cute.math.no_such_function(", "no_such_function"),
    "a type": ("dtype = out.element_type", 'dtype = out.element_type + "x"', "unsupported operand"),
    "what a loop carries": ("squares += wide * wide", 'squares = "text"', "carried through"),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_line_that_does_not_compile_is_named(project: Any, norm: Any, change: tuple[str, str, str]) -> None:
    old, new, words = change
    first = norm.compiled(BF16, BF16, True)
    text = edit(project, old, new)
    transaction = project.reloader.reload()
    with pytest.raises(Exception, match=words) as caught:
        norm.compiled(BF16, BF16, True)
    file = str(project.root / "own_norm.py")
    fault = describe(caught.value, {file: text}, {file})
    assert fault["file"] == file
    # Where a loop cannot run, the loop itself is named.
    assert fault["text"] in (next(line.strip() for line in text.splitlines() if new in line), LOOP)
    assert "\x1b" not in fault["error"]
    transaction.undo()
    assert norm.compiled(BF16, BF16, True) is first
