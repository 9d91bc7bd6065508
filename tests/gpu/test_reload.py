"""Edits of a kernel and of a layer while an engine serves, with requests before, during and after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.program import run


@pytest.fixture(scope="module")
def told(device: str, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `reloading.py` did, in float32: answers do not depend on the size of a batch."""
    scratch = tmp_path_factory.mktemp("reload")
    return run("reloading", tiny(dtype="float32"), scratch, device)


def test_an_edited_kernel_serves_those_that_came_later(told: dict[str, Any], device: str) -> None:
    edit = told["kernel"]
    assert edit["reply"]["success"], edit["reply"]
    assert (edit["reply"]["jit"]["compiled"] >= 1) == (device == "cuda")
    assert edit["reply"]["graphs"]["how"] == "swapped"
    assert edit["before"] == told["original"]
    assert edit["after"] == edit["alone"] != told["original"]


@pytest.mark.parametrize(("broken", "serves"), [("broken kernel", "kernel"), ("reads on the host", "layer")])
def test_a_broken_edit_is_undone_and_loses_nothing(told: dict[str, Any], broken: str, serves: str) -> None:
    edit = told[broken]
    assert not edit["reply"]["success"]
    assert edit["reply"]["phase"] in ("warm", "graphs")
    assert edit["generation"] == told[serves]["generation"]
    assert edit["before"] == edit["after"] == edit["alone"] == told[serves]["alone"]


def test_an_edited_layer_takes_back_what_the_kernel_did(told: dict[str, Any]) -> None:
    edit = told["layer"]
    assert edit["reply"]["success"], edit["reply"]
    assert edit["before"] == told["kernel"]["alone"]
    # Half in the kernel, twice in the layer: exact in floating point.
    assert edit["after"] == edit["alone"] == told["original"]


def test_the_first_code_gives_the_first_answers_again(told: dict[str, Any]) -> None:
    assert told["restored"]["alone"] == told["original"]
    for number in range(4):
        assert told[f"kernel again {number}"]["alone"] == told["kernel"]["alone"]
        assert told[f"restored again {number}"]["alone"] == told["original"]


def test_generations_do_not_pile_up(told: dict[str, Any]) -> None:
    assert told["restored again 3"]["memory"] - told["restored"]["memory"] <= 4 << 20
