"""Edits of kernels in Triton, Gluon and CuTe DSL while an engine serves that was told to use them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.block_fp8 import checkpoint
from tests.gpu.dsl_reloading import LANGUAGES
from tests.gpu.program import run

cases = pytest.mark.parametrize(
    ("device", "language"), [("cpu", "torch"), ("cpu", "fp8"), ("cuda", "gluon"), ("cuda", "cute")], scope="module"
)
CAPTURED = {
    "torch": ("attention.decode.reference", "attention.extend.reference"),
    "fp8": ("gemm.block_fp8_linear.reference",),
    "gluon": ("ops.activation.gluon silu_and_mul_kernel", "ops.norm.triton rms_norm_kernel"),
    "cute": ("kernel_cutlass_rms_norm_kernel", "ops.activation.gluon silu_and_mul_kernel"),
}
"""What a captured step launches of what was chosen."""
NOT_CAPTURED = {
    "torch": ("trimmed",),
    "fp8": (),
    "gluon": ("ops.activation.triton", "ops.embedding.triton", "ops.rope.triton"),
    "cute": ("ops.norm.triton", "ops.activation.triton"),
}


@pytest.fixture(scope="module")
def told(
    device: str, language: str, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What `dsl_reloading.py` did, in float32: answers do not depend on the size of a batch."""
    if language == "cute" and importlib.util.find_spec("nvidia_cutlass_dsl") is None:
        pytest.skip("CuTe DSL is not installed")
    scratch = tmp_path_factory.mktemp("dsl")
    model = eight_bits(tmp_path_factory.mktemp("fp8")) if language == "fp8" else tiny(dtype="float32")
    # What an earlier run compiled would not be counted.
    return run("dsl_reloading", model, scratch, device, language, TRITON_CACHE_DIR=str(scratch / "triton"))


def eight_bits(directory: Path) -> Path:
    """A model with block-scaled float8 weights."""
    checkpoint(directory, vocab_size=1000, max_position_embeddings=512)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def edits(told: dict[str, Any]) -> list[dict[str, Any]]:
    return [told[name] for name in sorted(told) if name.startswith("edit ")]


@cases
def test_an_edited_kernel_is_compiled_counted_and_serves(told: dict[str, Any], device: str, language: str) -> None:
    assert len(edits(told)) == len(LANGUAGES[language].edits)
    for edit in edits(told):
        reply = edit["changed"]["reply"]
        assert reply["success"], reply
        assert (reply["jit"]["compiled"] >= 1) == (device == "cuda"), reply
        assert (reply["jit"]["seconds"] > 0) == (device == "cuda"), reply
        assert reply["stale"] == [], reply
        assert edit["changed"]["answers"] != told["original"]
        assert edit["restored"]["reply"]["success"], edit["restored"]["reply"]
        assert edit["restored"]["answers"] == told["original"]


@cases
def test_a_kernel_that_does_not_compile_is_undone_and_its_line_named(told: dict[str, Any], language: str) -> None:
    for edit, (module, _, new) in zip(edits(told), LANGUAGES[language].edits, strict=True):
        reply = edit["broken"]["reply"]
        assert not reply["success"]
        assert reply["phase"] in ("warm", "graphs"), reply
        assert reply["undone"]
        assert reply["file"].endswith(f"{module.replace('.', '/')}.py"), reply
        assert new.replace("0.5", "no_such_name") in reply["text"], reply
        assert "no_such_name" in reply["error"], reply
        assert edit["broken"]["answers"] == edit["changed"]["answers"]


@cases
def test_what_was_chosen_at_the_start_is_what_is_warmed_and_captured(told: dict[str, Any], language: str) -> None:
    chosen = LANGUAGES[language]
    names = {assignment.replace("=", ".") for assignment in (*chosen.flags, *chosen.variables, *chosen.context)}
    assert names <= set(told["kernels"])
    for edit in edits(told):
        for tag in ("changed", "broken", "restored"):
            assert edit[tag]["kernels"] == told["kernels"], tag
            launched = "\n".join(edit[tag]["captured"])
            assert all(sign in launched for sign in CAPTURED[language]), launched
            assert not any(sign in launched for sign in NOT_CAPTURED[language]), launched


@pytest.mark.parametrize(("device", "language"), [("cpu", "torch")], scope="module")
def test_a_tactic_stays_through_edits_until_one_removes_it_which_the_reply_says(told: dict[str, Any]) -> None:
    tactics = told["tactics"]
    assert all(step["reply"]["success"] for step in tactics.values()), tactics
    # Halved in every step, as by the first edit.
    assert tactics["edited"]["answers"] == told["edit 0"]["changed"]["answers"]
    for step in ("default", "lost", "without tactics"):
        assert tactics[step]["answers"] == told["original"], step
    said = {step: [note for note in tactics[step]["reply"]["notes"] if "tactic" in note] for step in tactics}
    (note,) = said.pop("lost")
    assert note.startswith("attention.decode.reference no longer lists the tactic that was tuned for")
    assert not any(said.values()), said


@pytest.mark.parametrize(("device", "language"), [("cpu", "fp8")], scope="module")
def test_processed_weights_stay_through_reloads_and_an_edit_of_the_processing_is_named(told: dict[str, Any]) -> None:
    assert told["weights"]
    for edit in edits(told):
        assert all(edit[tag]["weights"] == told["weights"] for tag in ("changed", "broken", "restored"))
    process = told["process"]
    assert process["reply"]["success"], process["reply"]
    assert "tokenspeed_kernel.ops.gemm.block_fp8.process" in [
        item["what"] for item in process["reply"]["needs_restart"]
    ]
    assert process["weights"] == told["weights"]
    assert process["answers"] == told["original"]
