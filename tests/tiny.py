"""Tiny random models with the bundled model's tokenizer, for tests that need a whole server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from tokenspeed.runtime.config import ModelOptions
from tokenspeed.runtime.loader.source import resolve


def tiny_llama(directory: Path, *, num_heads: int = 4, num_kv_heads: int = 2, seed: int = 0) -> Path:
    """Write a Hugging Face directory of a Llama of two layers and 64 channels, and return it.

    The weights are large enough for its greedy text to vary from token to token.
    """
    source = resolve(ModelOptions(model="smollm2"), lambda _: None)
    assert source.tokenizer_dir is not None
    shutil.copytree(source.tokenizer_dir, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    head_dim, hidden, middle, layers = 16, 64, 96, 2
    config.update(
        hidden_size=hidden,
        intermediate_size=middle,
        num_hidden_layers=layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        dtype="float32",
    )
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    weights = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for index in range(layers):
        prefix = f"model.layers.{index}"
        weights |= {
            f"{prefix}.self_attn.q_proj.weight": random(num_heads * head_dim, hidden),
            f"{prefix}.self_attn.k_proj.weight": random(num_kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.v_proj.weight": random(num_kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.o_proj.weight": random(hidden, num_heads * head_dim),
            f"{prefix}.mlp.gate_proj.weight": random(middle, hidden),
            f"{prefix}.mlp.up_proj.weight": random(middle, hidden),
            f"{prefix}.mlp.down_proj.weight": random(hidden, middle),
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
        }
    save_file(weights, directory / "model.safetensors")
    return directory
