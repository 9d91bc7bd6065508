"""New code for the launches of recorded steps: what may be exchanged, what it does then, and how it is taken back."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

from tokenspeed.runtime.execution.graphs.base import BodyEdit, CannotSwap, EditedKernel
from tokenspeed.runtime.execution.graphs.cpu import CpuGraph, CpuGraphBackend
from tokenspeed.runtime.execution.graphs.cpu_swap import CpuSwap
from tokenspeed_kernel.launch import launch

from .conftest import ForwardPackage

KERNELS = """
import torch


def double(x):
    return helper(x) * 2


def helper(x):
    return x


def other(x):
    return x + 1


def beside(x):
    return x
"""
X, OUT = torch.ones(3), torch.zeros(3)


class Steps:
    """Two recorded steps: two launches of `double` and one of `other` in each, with plain code between them."""

    def __init__(self, forward: ForwardPackage):
        self.forward = forward
        self.kernels = forward.load({"k": KERNELS})["k"]
        backend = CpuGraphBackend([forward.name])
        self.graphs = [backend.capture(lambda size=size: self.step(size), label=f"{size}") for size in (2, 3)]

    def step(self, size: int) -> None:
        x = X[:size]
        for _ in range(2):
            x = launch("double", self.kernels.double, x)
        OUT[:size].copy_(launch("other", self.kernels.other, self.kernels.beside(x)))

    def edit(self, old: str, new: str, *names: str) -> list[FunctionType]:
        """Edit the module, and return the functions of these names."""
        assert old in KERNELS
        self.forward.patch({"k": KERNELS.replace(old, new)})
        return [getattr(self.kernels, name) for name in names]

    def prepare(self, *functions: Any) -> list[CpuSwap]:
        return CpuGraphBackend([self.forward.name]).prepare_swap(self.graphs, BodyEdit(functions))

    def results(self) -> list[list[float]]:
        found = []
        for graph in self.graphs:
            OUT.zero_()
            graph.replay()
            found.append(OUT.tolist())
        return found


@pytest.fixture
def steps(forward: ForwardPackage) -> Steps:
    return Steps(forward)


OLD = [[5, 5, 0], [5, 5, 5]]
NEW = [[10, 10, 0], [10, 10, 10]]


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [("* 2", "* 3", "double"), ("def helper(x):\n    return x", "def helper(x):\n    return x * 1.5", "helper")],
)
def test_a_body_and_a_callee_are_exchanged_taken_back_and_exchanged(
    steps: Steps, old: str, new: str, name: str
) -> None:
    functions = steps.edit(old, new, name)
    assert steps.results() == OLD
    for _ in range(2):
        swaps = steps.prepare(*functions)
        assert [swap.num_nodes for swap in swaps] == [2, 2]
        assert len({swap.specialisations for swap in swaps}) == 2, "the shapes differ"
        assert steps.results() == OLD
        for swap in swaps:
            swap.apply()
        assert steps.results() == NEW
        for swap in swaps:
            swap.undo()
            swap.undo()
        assert steps.results() == OLD
    for swap in swaps:
        swap.apply()
        swap.keep()
        swap.undo()
    assert steps.results() == NEW


def test_three_exchanges_in_a_row(steps: Steps) -> None:
    for factor in (3, 4, 5):
        for swap in steps.prepare(*steps.edit("* 2", f"* {factor}", "double")):
            swap.apply()
            swap.keep()
        assert steps.results()[1] == [factor**2 + 1] * 3


def test_what_is_not_edited_keeps_its_snapshot(steps: Steps) -> None:
    functions = steps.edit("* 2", "* 3", "double")
    untouched = [call for graph in steps.graphs for call in graph.launches if call.name == "other"]
    before = [call.code for call in untouched]
    for swap in steps.prepare(*functions):
        swap.apply()
    assert [call.code for call in untouched] == before


def test_code_that_runs_between_launches_is_not_exchanged(steps: Steps) -> None:
    functions = steps.edit("def beside(x):\n    return x", "def beside(x):\n    return x * 2", "beside")
    with pytest.raises(CannotSwap, match="beside runs outside of kernels"):
        steps.prepare(*functions)


def test_code_that_runs_in_a_launch_and_between_launches_is_not_exchanged(forward: ForwardPackage) -> None:
    kernels = forward.load({"k": KERNELS})["k"]
    backend = CpuGraphBackend([forward.name])
    graph = backend.capture(lambda: OUT.copy_(kernels.helper(launch("double", kernels.double, X))), label="both")
    with pytest.raises(CannotSwap, match="helper runs outside"):
        CpuGraphBackend([forward.name]).prepare_swap([graph], BodyEdit([kernels.helper]))


def test_code_that_no_launch_runs_is_not_exchanged(forward: ForwardPackage) -> None:
    kernels = forward.load({"k": KERNELS})["k"]
    graph = CpuGraphBackend([forward.name]).capture(lambda: OUT.copy_(launch("other", kernels.other, X)), label="one")
    with pytest.raises(CannotSwap, match="double is no part of a captured kernel"):
        CpuGraphBackend([forward.name]).prepare_swap([graph], BodyEdit([kernels.double]))


@pytest.mark.parametrize(
    "body",
    [
        "return (helper(x) * 2).double()",
        "return (helper(x) * 2)[:1]",
        "return (helper(x) * 2,)",
        "return x",
        "return helper(x).repeat(2)[::2]",
    ],
)
def test_results_of_another_kind_are_noticed_at_the_first_replay(steps: Steps, body: str) -> None:
    functions = steps.edit("return helper(x) * 2", body, "double")
    swaps = steps.prepare(*functions)
    for swap in swaps:
        swap.apply()
    with pytest.raises(CannotSwap, match="double returns tensors of other"):
        steps.graphs[1].replay()
    for swap in swaps:
        swap.undo()
    assert steps.results() == OLD


def test_a_function_that_a_launch_is_given_is_not_exchanged(forward: ForwardPackage) -> None:
    kernels = forward.load({"k": KERNELS + "\n\ndef call(function, x):\n    return function(x)\n"})["k"]
    backend = CpuGraphBackend([forward.name])
    graph = backend.capture(lambda: OUT.copy_(launch("call", kernels.call, kernels.other, X)), label="given")
    with pytest.raises(CannotSwap, match="call is given a function"):
        CpuGraphBackend([forward.name]).prepare_swap([graph], BodyEdit([kernels.other]))


class Jitted:
    """What holds a function as a kernel of the interpreter does."""

    def __init__(self, fn: Callable[..., Any]):
        self.fn = fn

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fn(x)
        return result


def test_a_kernel_that_a_launcher_calls(forward: ForwardPackage) -> None:
    source = f"from {Jitted.__module__} import Jitted\n\n\n@Jitted\ndef kernel(x):\n    return x * 2\n"
    source += "\n\ndef launcher(x):\n    return kernel(x)\n"
    kernels: ModuleType = forward.load({"k": source})["k"]
    graph: CpuGraph = CpuGraphBackend([forward.name]).capture(
        lambda: OUT.copy_(launch("launcher", kernels.launcher, X)), label="one"
    )
    forward.patch({"k": source.replace("* 2", "* 7")})
    edit = BodyEdit(kernels=[EditedKernel("k.kernel", kernels.kernel, {})])
    (swap,) = CpuGraphBackend([forward.name]).prepare_swap([graph], edit)
    graph.replay()
    assert OUT.tolist() == [2, 2, 2]
    swap.apply()
    graph.replay()
    assert OUT.tolist() == [7, 7, 7]
