"""Tiny random models of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def hf_model(model_type: str = "llama", **changes: Any) -> Any:
    """A tiny random model of transformers."""
    import transformers

    name = {"llama": "Llama", "qwen3": "Qwen3"}[model_type]
    sizes: dict[str, Any] = {
        "architectures": [f"{name}ForCausalLM"],
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "attn_implementation": "eager",
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**sizes, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return model


def write_model(directory: Path, **changes: Any) -> Any:
    """Write such a model as a Hugging Face directory, and return it. Its tokenizer is none: the engine takes ids."""
    model = hf_model(**changes)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps({}))
    return model
