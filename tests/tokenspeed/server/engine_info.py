"""What a small engine says of itself, for the tests of what the front makes of it."""

from __future__ import annotations

from typing import Any

from tokenspeed.runtime.protocol.state import EngineInfo


def engine_info(**changes: Any) -> EngineInfo:
    """A context of 32 tokens, 64 blocks of 4 tokens, 100 ids; `changes` replace fields."""
    fields: dict[str, Any] = {
        "model_path": "m",
        "tokenizer_path": "m",
        "model_type": "llama",
        "architectures": ("LlamaForCausalLM",),
        "vocab_size": 100,
        "max_model_len": 32,
        "eos_token_ids": (2,),
        "dtype": "float32",
        "device": "cpu",
        "tensor_parallel_size": 1,
        "block_size": 4,
        "num_blocks": 64,
    }
    return EngineInfo(**(fields | changes))
