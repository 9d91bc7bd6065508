"""Checkpoints into our own models, whole and spread over two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tokenspeed.errors import ModelError
from tokenspeed.runtime.config import ModelOptions
from tokenspeed.runtime.distributed.group import Group
from tokenspeed.runtime.loader.source import ModelSource, resolve
from tokenspeed.runtime.loader.weights import checkpoint_weights, load_weights
from tokenspeed.runtime.models.base import CausalLM
from tokenspeed.runtime.models.registry import build_model
from tokenspeed_kernel.progress import PROGRESS

CPU = torch.device("cpu")


def loaded(
    source: ModelSource,
    *,
    group: Group | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> CausalLM:
    model = build_model(source.config, group or Group.solo())
    model.materialize(CPU, dtype)
    load_weights(model, source, seed, CPU, dtype)
    return model


def find(path: Path, load_format: str = "auto") -> ModelSource:
    return resolve(ModelOptions(model=str(path), load_format=load_format), print)


def assert_equal(first: CausalLM, second: CausalLM) -> None:
    ours, theirs = first.state_dict(), second.state_dict()
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.fixture
def directory(tmp_path: Path, tiny_llama: LlamaForCausalLM) -> Path:
    tiny_llama.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_every_form_of_one_checkpoint_is_the_same_model(
    directory: Path,
    tmp_path: Path,
    tiny_llama: LlamaForCausalLM,
    write_gguf: Callable[..., Path],
    llama_tensors: Callable[..., Any],
) -> None:
    single = loaded(find(directory))
    tiny_llama.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert_equal(single, loaded(find(tmp_path / "sharded")))
    assert_equal(single, loaded(find(write_gguf(llama_tensors(tiny_llama)))))
    assert_equal(single, loaded(find(directory, "safetensors")))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_each_weight_shows_that_the_load_gets_on(directory: Path, load_format: str) -> None:
    source, before = find(directory, load_format), PROGRESS.count
    weights = len(loaded(source).weight_slots())
    assert PROGRESS.count >= before + weights
    assert PROGRESS.what.startswith("load ")


def test_the_same_weights_can_be_loaded_again(directory: Path) -> None:
    source = find(directory)
    model, fresh = loaded(source, seed=1), loaded(source)
    load_weights(model, find(directory, "dummy"), 3, CPU, torch.float32)
    assert not torch.equal(next(model.parameters()), next(fresh.parameters()))
    load_weights(model, source, 0, CPU, torch.float32)
    assert_equal(model, fresh)


def test_the_real_model_in_bfloat16(smollm2: ModelSource) -> None:
    model = loaded(smollm2, dtype=torch.bfloat16)
    embedding = dict(checkpoint_weights(smollm2, CPU))["model.embed_tokens.weight"]
    assert torch.equal(model.state_dict()["model.embed_tokens.weight"], embedding.to(torch.bfloat16))


def test_dummy_weights_do_not_depend_on_the_number_of_ranks(directory: Path) -> None:
    source = find(directory, "dummy")
    whole = loaded(source, seed=7)
    halves = [loaded(source, seed=7, group=Group("tp", rank, 2)) for rank in range(2)]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        parts = torch.cat([half.state_dict()[name] for half in halves])
        assert torch.equal(parts, whole.state_dict()[name]), name
    down = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(torch.cat([half.state_dict()[down] for half in halves], 1), whole.state_dict()[down])
    assert not torch.equal(whole.state_dict()[down], loaded(source, seed=8).state_dict()[down])


def test_dummy_weights_of_a_gguf_file(write_gguf: Callable[..., Path], directory: Path) -> None:
    assert_equal(loaded(find(write_gguf(), "dummy")), loaded(find(directory, "dummy")))


def test_weights_that_do_not_fit_are_named(directory: Path) -> None:
    file = directory / "model.safetensors"
    weights, source = load_file(file), find(directory)
    save_file({name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}, file)
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        loaded(source)
    save_file({**weights, "model.norm.weight": torch.ones(3)}, file)
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[3\]"):
        loaded(source)


def test_a_gguf_that_lacks_a_tensor(write_gguf: Callable[..., Path], llama_tensors: Callable[..., Any]) -> None:
    tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] = llama_tensors()
    tensors.pop("blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        loaded(find(write_gguf(tensors)))
