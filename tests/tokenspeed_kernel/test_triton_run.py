"""Launches without Triton's Python: the very binary and arguments that `kernel[grid](…)` launches, edits included."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the extra [gpu] is not installed")
import triton

from tests.tokenspeed_kernel.hopper import Hopper, hopper
from tests.tokenspeed_reload.conftest import Project
from tokenspeed_kernel import triton_run
from tokenspeed_kernel.triton_run import run_triton

KERNELS = """
import triton
import triton.language as tl
from launch_helpers import scale

GAIN = tl.constexpr(2.0)

@triton.jit(do_not_specialize=["plain"])
def kernel(x, y, number, plain, rate, FLAG: tl.constexpr, BLOCK: tl.constexpr = 16):
    column = tl.arange(0, BLOCK)
    value = scale(tl.load(x + column * number)) * GAIN * rate + plain
    if FLAG:
        value += tl.load(y + column)
    tl.store(x + column, value)
"""
GLUON = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

@gluon.jit
def kernel(x, number, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    column = gl.arange(0, BLOCK, layout=layout)
    gl.store(x + column * number, gl.load(x + column * number) * 2.0)
"""
HELPERS = "import triton\n@triton.jit\ndef scale(value):\n    return value * 3.0\n"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hopper]:
    monkeypatch.setattr(triton_run, "triton", triton)
    with hopper() as device:
        yield device


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    project = Project(tmp_path)
    project.write(launch_helpers=HELPERS, launch_kernels=KERNELS)
    project.watch("launch_helpers", "launch_kernels")
    yield project
    project.close()


MEMORY = torch.zeros(4096)
X = MEMORY[:1024]
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((X, X, 16, 16, 1.5), {"FLAG": True}),
    ((X, X, 17, 17, 2.5), {"FLAG": True}),
    ((X, X, 1, 1, 1.0), {"FLAG": True}),
    ((X, X, 0, 0, 1.0), {"FLAG": True}),
    ((X, X, -32, 3, 1.0), {"FLAG": True}),
    ((X, X, 2**31, 1, 1.0), {"FLAG": True}),
    ((X, X, 2**31 + 1, 1, 1.0), {"FLAG": True}),
    ((X, X, True, 1, 1.0), {"FLAG": True}),
    ((X, X, 16, 2**40, 1.0), {"FLAG": True}),
    ((MEMORY[1:], X, 16, 16, 1.0), {"FLAG": True}),
    ((MEMORY[4:], X, 16, 16, 1.0), {"FLAG": True}),
    ((X.half(), X, 16, 16, 1.0), {"FLAG": True}),
    ((X.bfloat16(), X.half(), 16, 16, 1.0), {"FLAG": True}),
    ((X, None, 16, 16, 1.0), {"FLAG": False}),
    ((X, X, 16, 16, 1.0), {"FLAG": False, "BLOCK": 32}),
    ((X, X, 16, 16, 1.0), {"BLOCK": 32, "FLAG": False, "num_warps": 8}),
    ((X, X, 16, 16, 1.0), {"FLAG": False, "num_warps": 8, "num_stages": 2}),
    ((X, X, 16, 16, 1), {"FLAG": True}),
]


def test_each_call_launches_what_triton_launches(device: Hopper, project: Project) -> None:
    kernel = project.load("launch_kernels").kernel
    for grid in ((3,), (3, 2), (3, 2, 5)):
        for args, meta in CALLS:
            kernel[grid](*args, **meta)
            for _ in range(2):
                run_triton(kernel, grid, *args, **meta)
    for number in range(0, len(device.launches), 3):
        by_triton, *by_us = device.launches[number : number + 3]
        for ours in by_us:
            assert ours[:2] == by_triton[:2]
            assert all(mine is theirs or mine == theirs for mine, theirs in zip(ours[2], by_triton[2], strict=True))
    assert len({function for function, _, _ in device.launches}) > 10


def test_the_second_launch_asks_triton_for_nothing(
    device: Hopper, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = project.load("launch_kernels").kernel
    args, meta = CALLS[0]
    run_triton(kernel, (1,), *args, **meta)
    monkeypatch.setattr(type(kernel), "run", None)
    run_triton(kernel, (1,), *args, **meta)
    assert len(device.launches) == 2


EDITS = {
    "the kernel": ("launch_kernels", "tl.store(x + column, value)", "tl.store(x + column, value + 1)"),
    "what it calls": ("launch_helpers", "value * 3.0", "value * 4.0"),
    "a constant": ("launch_kernels", "constexpr(2.0)", "constexpr(5.0)"),
    "a parameter": ("launch_kernels", "plain, rate, FLAG", "rate, plain, FLAG"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_is_launched_and_so_is_its_undo(device: Hopper, project: Project, edit: tuple[str, str, str]) -> None:
    module, old, new = edit
    kernel = project.load("launch_kernels").kernel
    args, meta = CALLS[0]

    def launched() -> int:
        for _ in range(2):
            run_triton(kernel, (1,), *args, **meta)
        (first, _, _), (second, _, _) = device.launches[-2:]
        assert first == second
        return first

    before = launched()
    path = project.root / f"{module}.py"
    path.write_text(path.read_text().replace(old, new))
    transaction = project.reloader.reload()
    after = launched()
    assert after != before
    transaction.undo()
    assert launched() == before
    project.reload()
    assert launched() != before


def test_an_edit_of_a_kernel_in_gluon_is_launched_and_so_is_its_undo(device: Hopper, project: Project) -> None:
    project.write(launch_gluon=GLUON)
    project.watch("launch_gluon")
    kernel = project.load("launch_gluon").kernel

    def launched() -> int:
        for _ in range(2):
            run_triton(kernel, (1,), X, 16, BLOCK=128, num_warps=4)
        (first, _, args), (second, _, again) = device.launches[-2:]
        assert (first, args) == (second, again)
        return first

    before = launched()
    path = project.root / "launch_gluon.py"
    path.write_text(path.read_text().replace("* 2.0", "* 3.0"))
    transaction = project.reloader.reload()
    assert launched() != before
    transaction.undo()
    assert launched() == before


def test_a_constant_that_changes_under_a_kernel_is_refused_as_triton_refuses_it(
    device: Hopper, project: Project
) -> None:
    module = project.load("launch_kernels")
    args, meta = CALLS[0]
    run_triton(module.kernel, (1,), *args, **meta)
    module.GAIN = triton.language.constexpr(7.0)
    with pytest.raises(RuntimeError, match="GAIN has changed"):
        run_triton(module.kernel, (1,), *args, **meta)


def test_who_watches_launches_sees_them(device: Hopper, project: Project) -> None:
    kernel = project.load("launch_kernels").kernel
    args, meta = CALLS[0]
    run_triton(kernel, (1,), *args, **meta)
    names: list[str] = []
    hook = triton.knobs.runtime.launch_enter_hook

    def note(metadata: Any) -> None:
        names.append(metadata.get()["name"])

    hook.add(note)
    try:
        run_triton(kernel, (1,), *args, **meta)
    finally:
        hook.remove(note)
    run_triton(kernel, (1,), *args, **meta)
    assert names == ["kernel"]


def test_other_kernels_are_called_as_usual(device: Hopper) -> None:
    class Other:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **meta: device.launches.append((0, grid, (*args, meta)))

    run_triton(Other(), (2, 3), 1, A=4)
    assert device.launches == [(0, (2, 3), (1, {"A": 4}))]
