"""The tokenizer of a GGUF file, as the files that `tokenizers`, transformers and the gateway read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tokenspeed.errors import ModelError
from tokenspeed.runtime.loader.gguf_config import hf_config, hf_generation_config
from tokenspeed.runtime.loader.gguf_file import GGUFFile
from tokenspeed.runtime.loader.storage import cache_root, make_once

FORMAT = 1
"""Part of the cache key; a change to what is written here needs another number."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTROL, _USER_DEFINED = 3, 4


def _words_and(numbers: str) -> str:
    """The expression that Llama 3 and Qwen 2 share but for the length of their numbers."""
    contractions = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return f"{contractions}|{words}|{numbers}|{rest}"


@dataclass(frozen=True)
class _Rules:
    """How text is cut into pieces before byte-pair merging; one for each `tokenizer.ggml.pre`."""

    splits: tuple[str, ...]
    """Expressions applied one after the other; matches and what lies between them become pieces."""
    nfc: bool = False
    """Whether the text is brought into Unicode's composed form first."""
    ignore_merges: bool = False
    """Whether a piece that is a token is taken whole, whatever the merges say."""
    add_bos: bool = False
    """Whether a text starts with the BOS token when the file does not say."""


_RULES = {
    "gpt-2": _Rules((_GPT2,)),
    "default": _Rules((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "smollm": _Rules((r"\p{N}", _GPT2)),
    "llama-bpe": _Rules((_words_and(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True),
    "qwen2": _Rules((_words_and(r"\p{N}"),), nfc=True),
}


def has_tokenizer(file: GGUFFile) -> bool:
    """Whether `file` brings a tokenizer at all, supported or not."""
    return "tokenizer.ggml.model" in file.metadata


def tokenizer_directory(file: GGUFFile, progress: Callable[[str], None]) -> Path:
    """A directory in the cache that holds the tokenizer of `file`, made once for each content of its header.

    In it are tokenizer.json, tokenizer_config.json, config.json and generation_config.json.

    Raises:
        ModelError: for a kind of tokenizer that is not supported, or a cache that cannot be written.
    """

    def build(scratch: Path) -> Path:
        progress(f"converting the tokenizer of {file.path.name}")
        directory = scratch / "tokenizer"
        directory.mkdir()
        build_tokenizer(file).save(str(directory / "tokenizer.json"))
        for name, content in (
            ("tokenizer_config.json", _tokenizer_config(file)),
            ("config.json", hf_config(file)),
            ("generation_config.json", hf_generation_config(file)),
        ):
            (directory / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
        return directory

    return make_once(cache_root() / "tokenizers" / f"{file.header_digest[:32]}-{FORMAT}", build)


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """The byte-level BPE tokenizer that the metadata of `file` describes.

    Raises:
        ModelError: for a kind of tokenizer that is not supported, or one that is damaged.
    """
    metadata = file.metadata
    rules = _rules(file)
    tokens = _tokens(file)
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rules.ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file.path} has a damaged tokenizer ({error}); download it again") from error
    tokenizer = Tokenizer(model)
    if rules.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(rules)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(file, rules, tokens)
    for special, kind in ((True, _CONTROL), (False, _USER_DEFINED)):
        names = [tokens[i] for i, k in enumerate(metadata.get("tokenizer.ggml.token_type", [])) if k == kind]
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(name, special=special, normalized=False) for name in names])
    return tokenizer


def _rules(file: GGUFFile) -> _Rules:
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"{file.path} has a tokenizer of model {kind}; supported is gpt2 (byte-level BPE), "
            "so use the model's Hugging Face directory"
        )
    name = file.metadata.get("tokenizer.ggml.pre", "missing")
    if name not in _RULES:
        raise ModelError(
            f"{file.path} has tokenizer.ggml.pre {name}; {', '.join(_RULES)} are supported, "
            "so use the model's Hugging Face directory"
        )
    return _RULES[name]


def _tokens(file: GGUFFile) -> list[str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(tokens, list) or not tokens or len(kinds) > len(tokens):
        raise ModelError(f"{file.path} has no usable tokenizer.ggml.tokens; convert the model again")
    return tokens


def _pre_tokenizer(rules: _Rules) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in rules.splits
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def _post_processor(file: GGUFFile, rules: _Rules, tokens: list[str]) -> processors.PostProcessor:
    metadata = file.metadata
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", rules.add_bos)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    begin = _token(metadata, tokens, "bos") if add_bos else None
    end = _token(metadata, tokens, "eos") if add_eos else None
    if begin is None and end is None:
        return processors.ByteLevel(trim_offsets=False)
    around = [token for token in (begin, end) if token is not None]
    template = " ".join(part for part in (begin, "$A", end) if part)
    return processors.TemplateProcessing(
        single=template, pair=None, special_tokens=[(token, tokens.index(token)) for token in around]
    )


def _token(metadata: Mapping[str, Any], tokens: list[str], name: str) -> str | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[token_id] if token_id is not None and 0 <= token_id < len(tokens) else None


def _tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    metadata, tokens = file.metadata, _tokens(file)
    rules = _rules(file)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: _token(metadata, tokens, key) for name, key in names.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length"),
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", rules.add_bos),
        "add_eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
        "chat_template": metadata.get("tokenizer.chat_template"),
        **special,
    }
    return {name: value for name, value in config.items() if value is not None}
