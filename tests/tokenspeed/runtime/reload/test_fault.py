"""Which line an engineer is shown."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tokenspeed.runtime.reload.fault import describe
from tokenspeed_reload import ReloadError


def load(path: Path, text: str, **names: object) -> ModuleType:
    path.write_text(text)
    module = ModuleType(path.stem)
    vars(module).update(names)
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def test_the_innermost_edited_line_is_named_and_the_way_is_told(tmp_path: Path) -> None:
    kernel, model = tmp_path / "kernel.py", tmp_path / "model.py"
    inner = load(kernel, "def norm(x):\n    return x / 0\n")
    outer = load(model, "def forward(x):\n    y = x\n    return norm(y)\n", norm=inner.norm)
    with pytest.raises(ZeroDivisionError) as raised:
        outer.forward(1)
    own = {str(kernel), str(model)}
    fault = describe(raised.value, {str(model): model.read_text()}, own)
    assert (fault["file"], fault["line"], fault["text"]) == (str(model), 3, "return norm(y)")
    assert fault["error"].startswith("ZeroDivisionError: ")
    assert [line.split(": ")[-1] for line in fault["trace"]] == ["return norm(y)", "return x / 0"]
    assert describe(raised.value, {}, own)["file"] == str(kernel)
    assert describe(raised.value, {}, set())["file"] == str(kernel)


def test_an_error_without_words_has_no_colon() -> None:
    with pytest.raises(KeyError) as raised:
        raise KeyError
    assert describe(raised.value, {}, set())["error"] == "KeyError"


CALLEE = """import triton
import triton.language as tl

@triton.jit
def callee(x):
    y = x + 1
    return y + no_such_name


@triton.jit
def kernel(x):
    tl.store(x, callee(tl.load(x)))
"""


def test_the_statement_of_a_kernel_that_does_not_compile_is_named(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", reason="the extra [gpu] is not installed")
    compiler = pytest.importorskip("triton.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    path = tmp_path / "kernel.py"
    kernel = load(path, CALLEE).kernel
    with pytest.raises(Exception, match="at 2:") as raised:
        triton.compile(compiler.ASTSource(kernel, {"x": "*fp32"}, {}), target=target)
    fault = describe(raised.value, {str(path): CALLEE}, {str(path)})
    assert (fault["file"], fault["line"], fault["text"]) == (str(path), 7, "return y + no_such_name")
    assert "no_such_name is not defined" in fault["error"]


def test_the_reloaders_own_place_and_phase_win() -> None:
    error = ReloadError("read", "SyntaxError: bad", module="m", file="/m.py", line=4, text="x x")
    fault = describe(error, {}, set())
    assert fault["phase"] == "read"
    assert fault["error"] == "m: SyntaxError: bad"
    assert (fault["file"], fault["line"], fault["text"]) == ("/m.py", 4, "x x")


def test_an_error_that_says_where_it_is_does_so_in_plain_text(tmp_path: Path) -> None:
    class Refused(Exception):
        filename, line = str(tmp_path / "kernel.py"), 2

    try:
        raise Refused("\x1b[91m\x1b[1merror:\x1b[0m bad")
    except Refused as error:
        fault = describe(error, {Refused.filename: "def norm(x):\n    return y\n"}, {Refused.filename, __file__})
        elsewhere = describe(error, {}, {__file__})
    assert (fault["file"], fault["line"], fault["text"]) == (Refused.filename, 2, "return y")
    assert fault["error"] == "Refused: error: bad"
    assert elsewhere["file"] == __file__


KERNELS = """
import triton
import triton.language as tl

@triton.jit
def scale(x):
    return x * {factor}

@triton.jit
def kernel(x):
    tl.store(x, scale(tl.load(x)))
"""


@pytest.mark.parametrize("factor", ["no_such_name", "tl.no_such_function(x)", "(2 if x > 0 else y)"])
def test_a_line_that_triton_does_not_compile_is_named(tmp_path: Path, factor: str) -> None:
    triton = pytest.importorskip("triton", reason="the extra [gpu] is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    path = tmp_path / "kernels.py"
    text = KERNELS.format(factor=factor)
    module = load(path, text)
    with pytest.raises(Exception) as raised:
        triton.compile(ASTSource(module.kernel, {"x": "*fp32"}, {}), target=GPUTarget("cuda", 90, 32))
    fault = describe(raised.value, {str(path): text}, {str(path)})
    assert (fault["file"], fault["text"]) == (str(path), f"return x * {factor}")
    assert fault["error"].startswith("CompilationError: ")


class Cyclic(Exception):
    """Has itself as its cause."""


class Shy(Exception):
    """Raises when it is asked for a line."""

    @property
    def line(self) -> int:
        raise ValueError("no")


def test_an_error_that_is_its_own_cause_is_told() -> None:
    with pytest.raises(Cyclic) as raised:
        error = Cyclic("round")
        raise error from error
    assert describe(raised.value, {}, set())["error"] == "Cyclic: round"


def test_an_error_that_cannot_be_looked_at_is_told_by_its_text() -> None:
    with pytest.raises(Shy) as raised:
        raise Shy("go away")
    fault = describe(raised.value, {}, set())
    assert (fault["error"], fault["file"], fault["trace"]) == ("Shy: go away", None, [])


def test_what_is_told_can_be_sent(tmp_path: Path) -> None:
    fault = describe(ReloadError("patch", "odd", file="\udcff.py", line=1, text="x = '\ud800'"), {}, set())
    assert (fault["file"], fault["text"]) == ("\\udcff.py", "x = '\\ud800'")
