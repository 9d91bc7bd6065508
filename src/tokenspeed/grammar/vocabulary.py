"""The texts of a model's tokens, as xgrammar wants them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast
from xgrammar import TokenizerInfo

from tokenspeed.grammar.errors import GrammarError


def read_vocabulary(directory: str | Path, vocab_size: int, eos_token_ids: Sequence[int]) -> TokenizerInfo:
    """From the tokenizer.json of `directory`; the same for compiler and ranks.

    Raises:
        GrammarError: when there is none.
    """
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise GrammarError(f"structured output needs {path}, which does not exist; use a model with a tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    return TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids))
