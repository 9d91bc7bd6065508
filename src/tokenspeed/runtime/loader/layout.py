"""Names of the files in a Hugging Face directory."""

from __future__ import annotations

SINGLE = "model.safetensors"
"""All weights, where they are in one file."""

INDEX = "model.safetensors.index.json"
"""Which weight is in which of several files."""

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tiktoken.model", "*.tiktoken")
"""Any of these is enough for the gateway."""
