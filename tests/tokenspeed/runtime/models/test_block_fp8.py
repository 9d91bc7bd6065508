"""A checkpoint with block-scaled float8 weights, from its files to its logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.block_fp8 import SIZES, checkpoint
from tokenspeed.errors import ConfigError, ModelError
from tokenspeed.runtime.config import ModelOptions
from tokenspeed.runtime.distributed.group import Group
from tokenspeed.runtime.loader.source import resolve
from tokenspeed.runtime.loader.weights import load_weights
from tokenspeed.runtime.models.base import CausalLM
from tokenspeed.runtime.models.config import ModelConfig
from tokenspeed.runtime.models.registry import build_model

CPU = torch.device("cpu")


def loaded(directory: Path, group: Group | None = None) -> CausalLM:
    source = resolve(ModelOptions(model=str(directory)), lambda _: None)
    model = build_model(source.config, group or Group.solo())
    model.materialize(CPU, torch.float32)
    load_weights(model, source, 0, CPU, torch.float32)
    model.plan(CPU, torch.float32)
    return model


def test_its_logits_are_those_of_the_dequantised_weights(tmp_path: Path, make_runner: Any, make_row: Any) -> None:
    directory, exact = checkpoint(tmp_path)
    model = loaded(directory)
    gate_up = model.get_submodule("model.layers.0.mlp.gate_up_proj")
    assert gate_up.weight.dtype == torch.float8_e4m3fn
    dense = build_model(ModelConfig.from_hf(SIZES), Group.solo())
    dense.materialize(CPU, torch.float32)
    dense.load_weights(exact.items())
    dense.plan(CPU, torch.float32)
    rows = [make_row([1, 5, 9, 33, 2], 0, [1, 2]), make_row([7], 0, [3])]
    torch.testing.assert_close(make_runner(model).step(rows), make_runner(dense).step(rows), rtol=1e-4, atol=1e-4)


def test_processed_weights_outlive_a_new_plan(tmp_path: Path) -> None:
    model = loaded(checkpoint(tmp_path)[0])
    layer: Any = model.get_submodule("model.layers.0.self_attn.o_proj")
    before = layer.packed
    model.plan(CPU, torch.float32)
    assert layer.packed is before


def test_ranks_hold_whole_blocks_of_it(tmp_path: Path) -> None:
    directory, _ = checkpoint(tmp_path)
    x = torch.randn(3, 256)
    parts = []
    for rank in (0, 1):
        model = loaded(directory, Group("tensor", rank, 2))
        down: Any = model.get_submodule("model.layers.1.mlp.down_proj")
        parts.append(down.project(x[:, 128 * rank : 128 * rank + 128], None))
    whole: Any = loaded(directory).get_submodule("model.layers.1.mlp.down_proj")
    torch.testing.assert_close(parts[0] + parts[1], whole(x), rtol=1e-4, atol=1e-5)


def test_ranks_that_would_cut_a_block_are_refused(tmp_path: Path) -> None:
    directory, _ = checkpoint(tmp_path)
    with pytest.raises(
        ConfigError, match=r"size 4 does not fit .* MLP of 256 in float8 blocks of 128; use one of: 1, 2$"
    ):
        loaded(directory, Group("tensor", 0, 4))


def test_weights_that_are_not_what_config_json_says_are_refused(tmp_path: Path) -> None:
    directory, exact = checkpoint(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    with pytest.raises(ModelError, match=r"_proj.weight as torch.float8_e4m3fn; use a bfloat16 checkpoint"):
        loaded(directory)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(exact, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"_proj.weight as torch.float32, not fp8 as config.json"):
        loaded(directory)


def test_dummy_weights_fill_it(tmp_path: Path, make_runner: Any, make_row: Any) -> None:
    directory, _ = checkpoint(tmp_path)
    source = resolve(ModelOptions(model=str(directory), load_format="dummy"), lambda _: None)
    model = build_model(source.config, Group.solo())
    model.materialize(CPU, torch.float32)
    load_weights(model, source, 0, CPU, torch.float32)
    model.plan(CPU, torch.float32)
    assert make_runner(model).step([make_row([1, 5], 0, [1])]).isfinite().all()
    assert model.weight_bytes(torch.float32) == sum(p.numel() * p.dtype.itemsize for p in model.parameters())
