"""Ranges for a profiler open and close in order, and cost nothing where nobody asked for them."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.runtime.execution.ranges import Ranges


class Model(torch.nn.Module):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Identity(), Fails() if fails else torch.nn.Identity()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Fails(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What NVTX hears: it has no way to be asked."""
    heard: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", heard.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: heard.append("end"))
    return heard


def test_steps_phases_and_layers_are_nested(told: list[str]) -> None:
    ranges, model = Ranges(True), Model()
    ranges.around_layers(model)
    with ranges("decode 4"), ranges("forward"):
        model(torch.zeros(1))
    assert told == ["decode 4", "forward", "layers.0", "end", "layers.1", "end", "end", "end"]


def test_a_layer_that_fails_closes_its_range(told: list[str]) -> None:
    ranges, model = Ranges(True), Model(fails=True)
    ranges.around_layers(model)
    with pytest.raises(ValueError, match="no"), ranges("step"):
        model(torch.zeros(1))
    assert told.count("end") == len(told) / 2


def test_without_the_flag_nothing_is_opened_or_hooked(told: list[str]) -> None:
    ranges, model = Ranges(False), Model()
    ranges.around_layers(model)
    with ranges("step"):
        model(torch.zeros(1))
    assert told == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
