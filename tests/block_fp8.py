"""Checkpoints with block-scaled float8 weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tokenspeed.runtime.distributed.group import Group
from tokenspeed.runtime.models.config import ModelConfig
from tokenspeed.runtime.models.registry import build_model

SIZES = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 67,
    "hidden_size": 200,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 128,
}
FORM = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 weights and the scale of each block, as quantisers write them."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, 128, columns, 128)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-6) / 448
    scaled = (blocks / scales[:, None, :, None]).view(rows * 128, columns * 128)
    return scaled[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn).contiguous(), scales


def checkpoint(directory: Path, **changes: Any) -> tuple[Path, dict[str, Tensor]]:
    """A quantised model on disk, and its dequantised weights."""
    raw = {**SIZES, "quantization_config": FORM, **changes}
    (directory / "config.json").write_text(json.dumps(raw))
    dense = build_model(ModelConfig.from_hf({**raw, "quantization_config": None}), Group.solo())
    generator = torch.Generator().manual_seed(0)
    stored, exact = {}, {}
    for name, (_, slot) in dense.weight_slots().items():
        weight = torch.randn(slot.shape, generator=generator) * 0.1
        if not name.endswith("_proj.weight"):
            stored[name] = exact[name] = weight
            continue
        stored[name], scales = quantised(weight)
        stored[f"{name}_scale_inv"] = scales
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
        exact[name] = stored[name].float() * spread
    save_file(stored, directory / "model.safetensors")
    return directory, exact
