"""A tokenizer of one token a byte, and two that stand for no text."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS = 257
VOCAB_SIZE = 300  # more than the tokenizer has, as in many models


def write_tokenizer(directory: Path) -> None:
    """Write its tokenizer.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<start>", "<end>")])
    tokenizer.save(str(directory / "tokenizer.json"))
