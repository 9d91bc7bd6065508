"""Which Triton kernels of the forward packages are found, and under which handle."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tokenspeed.runtime.execution.graphs.triton_kernels import loaded_kernels

triton = pytest.importorskip("triton")


def one(x: Any) -> None:
    """A kernel's body is not run here."""


def loaded(handle: int | None) -> Any:
    """What Triton keeps of a compiled kernel; without a handle it was never launched."""
    return SimpleNamespace(name="one", function=handle)


@pytest.fixture
def module() -> Iterator[ModuleType]:
    made = ModuleType("forward_part.kernels")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def test_every_launched_specialisation_is_found_behind_wrappers_too(module: ModuleType) -> None:
    plain, tuned, guessed = triton.jit(one), triton.jit(one), triton.jit(one)
    plain.device_caches[0] = ({"fp16": loaded(11), "bf16": loaded(12), "unused": loaded(None)}, None)
    plain.device_caches[1] = ({"fp16": loaded(13)}, None)
    tuned.device_caches[0] = ({"a": loaded(21)}, None)
    guessed.device_caches[0] = ({"b": loaded(31)}, None)
    module.plain = plain
    module.tuned = triton.autotune([triton.Config({})], key=[])(tuned)
    module.guessed = triton.heuristics({})(guessed)
    module.something = one
    found = dict(loaded_kernels(["forward_part"]))
    assert {handle: kernel.specialisation for handle, kernel in found.items()} == {
        11: "fp16", 12: "bf16", 13: "fp16", 21: "a", 31: "b",
    }  # fmt: skip
    assert found[21].source is tuned and found[21].compiled.function == 21
    assert found[11].source.fn is one


def test_kernels_elsewhere_are_left_out(module: ModuleType) -> None:
    module.plain = triton.jit(one)
    module.plain.device_caches[0] = ({"k": loaded(5)}, None)
    assert dict(loaded_kernels(["forward"])) == {}
    assert dict(loaded_kernels(["forward_part.kernels"])).keys() == {5}
