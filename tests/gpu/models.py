"""Small random models as Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TOKENS = 1000


def hf_config(model_type: str, **changes: Any) -> Any:
    """A configuration of transformers, of a shape that every kernel covers."""
    import transformers

    name = {"llama": "Llama", "qwen3": "Qwen3"}[model_type]
    sizes: dict[str, Any] = {
        "architectures": [f"{name}ForCausalLM"],
        "vocab_size": TOKENS,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "initializer_range": 0.08,
        "eos_token_id": 0,
        "tie_word_embeddings": model_type == "llama",
    }
    return getattr(transformers, f"{name}Config")(**{**sizes, **changes})


def hf_model(config: Any) -> Any:
    """The model of transformers with random weights, float32 on the CPU."""
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, config.architectures[0])(config).eval()


def write_model(directory: Path, model_type: str, dtype: str) -> Path:
    """Write a model and return the directory. Its tokenizer is none: the engine takes ids."""
    hf_model(hf_config(model_type)).to(getattr(torch, dtype)).save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps({}))
    return directory
