"""Kernels exchanged in captured steps while an engine serves: on a GPU, and in recorded steps on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.program import run

SWAPS = ("swap 0", "swap 1", "swap 2", "swap after undo", "swap after failed proof", "swap after recapture")
OTHER_SWAPS = ("callee", "specialised", "shared memory")
CAPTURES = ("layer", "restored", "launch 0", "launch 1", "launches restored")


@pytest.fixture(scope="module")
def told(device: str, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `swapping.py` did, in float32: answers do not depend on the size of a batch."""
    scratch = tmp_path_factory.mktemp("swap")
    return run("swapping", tiny(dtype="float32"), scratch, device)


@pytest.mark.parametrize("tag", [*SWAPS, *OTHER_SWAPS])
def test_an_edit_of_a_body_is_swapped_into_every_graph(told: dict[str, Any], tag: str) -> None:
    reply = told[tag]["reply"]
    assert reply["success"], reply
    assert (reply["graphs"]["how"], reply["graphs"]["decode"], reply["graphs"]["prefill"]) == ("swapped", 3, 2), reply
    assert f"swapped {reply['graphs']['nodes']} node(s) in" in reply["message"]
    assert reply["graphs"]["nodes"] >= 4, "as many as there are layers, at least"


@pytest.mark.parametrize("tag", CAPTURES)
def test_whatever_is_more_is_captured_anew(told: dict[str, Any], tag: str) -> None:
    reply = told[tag]["reply"]
    assert reply["success"], reply
    assert reply["graphs"]["how"] == "recaptured", reply
    if "launch" in tag:
        assert any("captured anew" in note for note in reply["notes"]), reply["notes"]


@pytest.mark.parametrize("tag", [*SWAPS, *OTHER_SWAPS, *CAPTURES, "broken", "no proof"])
def test_graphs_compute_what_the_code_computes_and_what_a_new_capture_does(told: dict[str, Any], tag: str) -> None:
    assert len(told[tag]["same"]) == 5
    assert all(all(each) for each in told[tag]["same"]), told[tag]["same"]
    assert told[tag]["nodes_alike"]


def test_every_launch_of_the_kernel_is_exchanged(told: dict[str, Any]) -> None:
    # One in each of 4 layers, in each of 5 graphs.
    assert {told[tag]["reply"]["graphs"]["nodes"] for tag in SWAPS} == {20}


@pytest.mark.parametrize(
    ("tag", "phase", "serves"), [("broken", "warm", "swap 2"), ("no proof", "graphs", "swap after undo")]
)
def test_what_fails_is_undone(told: dict[str, Any], tag: str, phase: str, serves: str) -> None:
    failed = told[tag]
    assert not failed["reply"]["success"] and failed["reply"]["phase"] == phase, failed["reply"]
    assert failed["generation"] == told[serves]["generation"]
    assert failed["before"] == failed["after"] == told[serves]["after"]


def test_requests_see_the_new_code_from_the_reload_on(told: dict[str, Any]) -> None:
    assert told["swap 0"]["before"] == told["original"]
    assert told["swap 0"]["after"] == told["swap 1"]["before"] == told["swap after undo"]["after"] != told["original"]
    assert told["swap 1"]["after"] == told["swap 2"]["before"] == told["swap after failed proof"]["after"]
    assert told["swap 1"]["after"] != told["swap 0"]["after"] == told["swap after recapture"]["after"]
    assert told["restored"]["after"] == told["launches restored"]["after"] == told["original"]
    assert told["callee"]["after"] != told["original"] != told["specialised"]["after"]


def test_nothing_is_left_of_what_was_exchanged(told: dict[str, Any], device: str) -> None:
    if device == "cpu":
        pytest.skip("nothing of a kernel lies on a device")
    first, last = told["again 1 restored"], told["again 5 restored"]
    assert last["modules"] == first["modules"]
    assert abs(last["memory"] - first["memory"]) <= 8 << 20
