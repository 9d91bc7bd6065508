"""A graph runs the code of its capture, whatever is patched in place afterwards."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from tokenspeed.runtime.execution.graphs.cpu import CpuGraph, CpuGraphBackend
from tokenspeed_kernel.launch import launch

from .conftest import ForwardPackage


def read_cases(text: str) -> dict[str, dict[str, str]]:
    """Name of a case -> module -> source, with ONE in place."""
    cases = {}
    for case in text.split("\n## ")[1:]:
        name, _, body = case.partition("\n")
        modules = (part.partition("\n") for part in f"\n{body}".split("\n# ")[1:])
        cases[name] = {module: source for module, _, source in modules}
    return cases


EDITS = read_cases(Path(__file__).with_name("edits.txt").read_text())


def capture(backend: CpuGraphBackend, kernel: object, x: torch.Tensor, out: torch.Tensor) -> CpuGraph:
    return backend.capture(lambda: out.copy_(launch("kernel", kernel, x)), label="test")


def load(forward: ForwardPackage, sources: dict[str, str]) -> object:
    """Import the first version of a case; a library of it lies outside of the forward package."""
    library = sources.get("jitlib")
    if library is not None:
        (forward.directory.parent / "jitlib.py").write_text(library)
    inside = {module: text.replace("ONE", "1") for module, text in sources.items() if module != "jitlib"}
    return forward.load(inside)["k"].kernel


@pytest.mark.parametrize("case", EDITS)
def test_two_generations_replay_alternately(case: str, forward: ForwardPackage) -> None:
    x, out = torch.ones(3), torch.zeros(3)
    kernel = load(forward, EDITS[case])
    old = capture(CpuGraphBackend([forward.name]), kernel, x, out)
    assert out.tolist() == [1, 1, 1]

    forward.patch({module: text.replace("ONE", "2") for module, text in EDITS[case].items() if "ONE" in text})
    kernel = importlib.import_module(f"{forward.name}.k").kernel
    new = capture(CpuGraphBackend([forward.name]), kernel, x, out)
    assert out.tolist() == [2, 2, 2], "the edit itself must work"
    for value in (3.0, 5.0):
        x.fill_(value)
        old.replay()
        assert out.tolist() == [value] * 3
        new.replay()
        assert out.tolist() == [2 * value] * 3


@pytest.mark.parametrize("case", EDITS)
def test_a_capture_leaves_the_live_code_alone(case: str, forward: ForwardPackage) -> None:
    x, out = torch.ones(3), torch.zeros(3)
    capture(CpuGraphBackend([forward.name]), load(forward, EDITS[case]), x, out)
    forward.patch({module: text.replace("ONE", "2") for module, text in EDITS[case].items() if "ONE" in text})
    assert importlib.import_module(f"{forward.name}.k").kernel(x).tolist() == [2, 2, 2]
