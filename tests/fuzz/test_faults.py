"""Broken edits: each fits the sources, and is broken in what its kind says."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.faults import ACROSS_RANKS, ALWAYS, DEADLY, Make, loading, not_finite
from tests.fuzz.sources import Sources

SYNTAX: tuple[Make, ...] = (loading.syntax, loading.new_file_fails)


@pytest.mark.parametrize("make", [*ALWAYS, *ACROSS_RANKS, *DEADLY], ids=lambda make: make.__name__)
def test_a_fault_fits_the_installed_sources(make: Make) -> None:
    for number in range(12):
        sources = Sources()
        make(random.Random(number), sources, f"mark_{number}", 2)
        changed = sources.changed(Sources())
        assert changed
        for module in changed if make not in SYNTAX else ():
            compile(sources[module], module, "exec", dont_inherit=True)


@pytest.mark.parametrize("expression", not_finite.EXPRESSIONS)
def test_an_expression_gives_what_is_no_number(expression: str) -> None:
    torch = pytest.importorskip("torch")
    for shape in ((8, 64), (1, 64), (3, 2, 16)):
        value = eval(expression.format("value"), {"torch": torch, "value": torch.randn(shape)})
        assert value.shape == shape and value.dtype == torch.float32
        assert not value.isfinite().all()
