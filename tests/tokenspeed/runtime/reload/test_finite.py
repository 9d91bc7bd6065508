"""Numbers that are none: told where edited code makes them, and left alone where they were there before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine import InProcessEngine
from tests.tiny import tiny_llama
from tokenspeed.runtime.config import CacheOptions, Config, GraphOptions, ModelOptions, SchedulerOptions
from tokenspeed.runtime.execution.executor import Executor
from tokenspeed.runtime.reload.finite import Finiteness, NotFinite, Observation

NAN = float("nan")
LAYER = 1


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    model = tiny_llama(tmp_path_factory.mktemp("model"))
    config = Config(
        model=ModelOptions(model=str(model), device="cpu", max_model_len=64),
        scheduler=SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=32),
        cache=CacheOptions(max_total_tokens=256),
        graphs=GraphOptions(cpu_graphs=True, cudagraph_capture_sizes=(1, 4), prefill_graph_max_tokens=16),
    )
    return InProcessEngine(config, tmp_path_factory.mktemp("run")).start().executor


class Edit:
    """Takes the place of functions of single objects of the model."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.model: Any = executor.model
        self.layer: Any = self.model.model.layers[LAYER]
        self._undo: list[tuple[Any, str]] = []

    def __call__(self, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
        """Let the method give what `change` makes of its result."""
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: change(original(*args, **kwargs)))
        self._undo.append((owner, name))

    def undo(self) -> None:
        for owner, name in reversed(self._undo):
            vars(owner).pop(name, None)
        self._undo.clear()


@pytest.fixture
def edit(executor: Executor) -> Iterator[Edit]:
    edit = Edit(executor)
    yield edit
    edit.undo()


def observe(executor: Executor) -> Observation:
    seen = Observation()
    executor.warm(lambda _: None, seen.look)
    executor.replay_largest(executor.capture(1, lambda _: None), seen.look)
    return seen


@pytest.fixture
def before(executor: Executor) -> Finiteness:
    return accepted(executor)


def accepted(executor: Executor) -> Finiteness:
    before = Finiteness()
    before.accept(observe(executor))
    return before


def first(value: float) -> Callable[[Tensor], Tensor]:
    """A change of the first column."""

    def change(result: Tensor) -> Tensor:
        result = result.clone()
        result[..., 0] = value
        return result

    return change


def refused(executor: Executor, before: Finiteness) -> NotFinite:
    with pytest.raises(NotFinite) as raised:
        observe(executor).check(before, executor)
    return raised.value


def test_code_that_stays_passes(executor: Executor, before: Finiteness) -> None:
    observe(executor).check(before, executor)


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_the_layer_that_makes_them_is_named(executor: Executor, before: Finiteness, edit: Edit, value: float) -> None:
    edit(edit.layer.mlp, "forward", first(value))
    error = refused(executor, before)
    assert str(error).startswith("the hidden states of a dummy prefill of 8 token(s) have ")
    assert f"they come first from model.layers.{LAYER}.mlp (LlamaMLP); start with --no-reload-check-finite" in str(
        error
    )
    assert error.place is not None and error.place.filename.endswith("llama.py")
    assert str(error.place.line).startswith("def forward(self, hidden")


def test_what_a_layer_does_between_its_parts_is_its_own(executor: Executor, before: Finiteness, edit: Edit) -> None:
    forward = edit.layer.forward
    edit(edit.layer, "forward", lambda result: result)
    edit.layer.forward = lambda hidden, *rest: forward(first(NAN)(hidden), *rest)
    assert f"first from model.layers.{LAYER} (LlamaDecoderLayer)" in str(refused(executor, before))


def test_logits_have_no_layer(executor: Executor, before: Finiteness, edit: Edit) -> None:
    edit(edit.model, "compute_logits", first(NAN))
    error = refused(executor, before)
    assert "the logits of a dummy prefill of 8 token(s) have 3 of " in str(error)
    assert "they come from LlamaForCausalLM.compute_logits" in str(error)
    assert error.place is not None and str(error.place.line).startswith("def compute_logits")


def test_a_masked_vocabulary_is_none_of_the_edit(executor: Executor, edit: Edit) -> None:
    edit(edit.model, "compute_logits", first(-float("inf")))
    before = accepted(executor)
    observe(executor).check(before, executor)
    edit(edit.layer.mlp, "forward", lambda result: result * 2)
    observe(executor).check(before, executor)
    edit(edit.model, "compute_logits", lambda logits: torch.where(logits > 0, logits, -float("inf")))
    assert "the logits" in str(refused(executor, before))


def test_a_model_that_overflows_is_not_refused_and_an_edit_that_mends_it_counts(
    executor: Executor, edit: Edit, before: Finiteness
) -> None:
    edit(edit.layer.mlp, "forward", lambda result: result * NAN)
    overflows = accepted(executor)
    edit(edit.layer.self_attn, "forward", lambda result: result * 2)
    observe(executor).check(overflows, executor)
    edit.undo()
    mended = observe(executor)
    mended.check(overflows, executor)
    overflows.accept(mended)
    edit(edit.layer.mlp, "forward", lambda result: result * NAN)
    refused(executor, overflows)


def test_what_only_a_captured_step_gives_is_told_as_such(executor: Executor, before: Finiteness, edit: Edit) -> None:
    edit(edit.model, "compute_logits", lambda logits: first(NAN)(logits) if len(logits) == 4 else logits)
    error = refused(executor, before)
    assert "the logits of a dummy decode of 4 token(s) in a graph have 4 of " in str(error)
    assert "they come from LlamaForCausalLM.compute_logits" in str(error)


def test_code_that_writes_them_into_scratch_blocks_leaves_none_for_the_next(
    executor: Executor, before: Finiteness, edit: Edit
) -> None:
    edit(edit.layer.self_attn.qkv_proj, "forward", lambda result: tuple(part * NAN for part in result))
    refused(executor, before)
    edit.undo()
    observe(executor).check(before, executor)
