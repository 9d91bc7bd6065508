"""The converted tokenizer against llama.cpp's rules, written down here once more and run by `regex`."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from tokenspeed.errors import ModelError
from tokenspeed.runtime.loader.gguf_file import open_gguf
from tokenspeed.runtime.loader.gguf_tokenizer import build_tokenizer, tokenizer_directory
from tokenspeed.runtime.loader.source import ModelSource

WriteGGUF = Callable[..., Path]

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_CPP = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [LLAMA3],
    "qwen2": [LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}

TEXTS = st.one_of(
    st.text(),
    st.text(alphabet=st.sampled_from("aZé日 \n\r\t'sdLE019½²٣.,!$+_<|>\u00a0\u3000🙂\u0301")),
    st.lists(
        st.sampled_from(["Hello", " world", "12345", " 2024-11-29", "3.14", "\n\n  ", "it's", "WE'LL", " ", "ünïcödé"])
    ).map("".join),
)


def byte_alphabet() -> list[str]:
    """GPT-2's letter for each byte: printable ones stand for themselves, the others follow from U+0100."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    rest = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(rest)) for byte in range(256)]


BYTES = byte_alphabet()


def pieces(text: str, expressions: Sequence[str]) -> list[str]:
    """Each expression splits what the one before left; what lies between matches is a piece of its own."""

    def split(piece: str, expression: str) -> Iterator[str]:
        position = 0
        for match in regex.finditer(expression, piece):
            yield piece[position : match.start()]
            yield match.group()
            position = match.end()
        yield piece[position:]

    found = [text]
    for expression in expressions:
        found = [part for piece in found for part in split(piece, expression) if part]
    return found


class Oracle:
    """Byte-pair encoding as its definition has it: always the merge that was learnt first, leftmost first."""

    def __init__(self, path: Path) -> None:
        metadata = open_gguf(path).metadata
        self.expressions = LLAMA_CPP[metadata["tokenizer.ggml.pre"]]
        self.ignore_merges = metadata["tokenizer.ggml.pre"] == "llama-bpe"
        self.ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(metadata["tokenizer.ggml.merges"])}

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; a byte that is no token is left out, as llama.cpp and the original tokenizer do."""
        parts = (part for piece in pieces(text, self.expressions) for part in self.merge(piece))
        return [self.ids[part] for part in parts if part in self.ids]

    def knows(self, text: str) -> bool:
        """Whether every byte of `text` is a token."""
        return all(BYTES[byte] in self.ids for byte in text.encode())

    def merge(self, piece: str) -> list[str]:
        parts = [BYTES[byte] for byte in piece.encode()]
        if self.ignore_merges and "".join(parts) in self.ids:
            return ["".join(parts)]
        while True:
            pairs = [(self.ranks.get(pair, len(self.ranks)), i) for i, pair in enumerate(pairwise(parts))]
            rank, at = min(pairs, default=(len(self.ranks), 0))
            if rank == len(self.ranks):
                return parts
            parts[at : at + 2] = [parts[at] + parts[at + 1]]


def tokenizer_metadata(kind: str, **changes: Any) -> dict[str, Any]:
    """A tokenizer with all bytes, a few merges, two control tokens and one that the user defined."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3", "' s", "Ċ Ċ", "Ġ Ġ", "Ã ©", ". ,"]
    tokens = [*BYTES, *(merge.replace(" ", "") for merge in merges), "<s>", "</s>", "<tool>", "Ġwho", "123!"]
    kinds = [1] * len(tokens)
    for token, number in (("<s>", 3), ("</s>", 3), ("<tool>", 4)):
        kinds[tokens.index(token)] = number
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
        "tokenizer.chat_template": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    }
    return {**metadata, **{f"tokenizer.ggml.{name}": value for name, value in changes.items()}}


# ---- the real tokenizer ----


@pytest.fixture(scope="module")
def real(smollm2: ModelSource) -> Tokenizer:
    assert smollm2.tokenizer_dir is not None
    return Tokenizer.from_file(str(smollm2.tokenizer_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def real_oracle(smollm2: ModelSource) -> Oracle:
    return Oracle(smollm2.path)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, we can use", [19556, 28, 392, 416, 722]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("\n", [198]),
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
        ("<|im_start|>user\n", [1, 4093, 198]),
    ],
)
def test_known_ids(real: Tokenizer, text: str, ids: list[int]) -> None:
    assert real.encode(text).ids == ids


@settings(deadline=None, max_examples=400)
@given(text=TEXTS)
def test_it_follows_llama_cpp_and_gives_the_text_back(real: Tokenizer, real_oracle: Oracle, text: str) -> None:
    ids = real.encode(text).ids
    assert ids == real_oracle.encode(text)
    if real_oracle.knows(text):
        assert real.decode(ids, skip_special_tokens=False) == text


def test_every_digit_is_a_token(real: Tokenizer) -> None:
    assert real.encode("in 2024: 3141592").tokens == ["in", "Ġ", *"2024", ":", "Ġ", *"3141592"]


def test_transformers_reads_the_directory(smollm2: ModelSource) -> None:
    directory = str(smollm2.tokenizer_dir)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == (
        "<|im_start|>",
        "<|im_end|>",
        2,
    )
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi 42"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(tokenizer(prompt).input_ids) == prompt
    assert AutoConfig.from_pretrained(directory).num_hidden_layers == 30
    assert GenerationConfig.from_pretrained(directory).eos_token_id == 2


# ---- every kind that is supported ----


@pytest.mark.parametrize("pre", sorted(LLAMA_CPP))
def test_each_kind_follows_llama_cpp(write_gguf: WriteGGUF, pre: str) -> None:
    path = write_gguf(metadata=tokenizer_metadata(pre, add_bos_token=False))
    tokenizer, oracle = build_tokenizer(open_gguf(path)), Oracle(path)

    @settings(deadline=None, max_examples=150, database=None)
    @given(text=TEXTS)
    def check(text: str) -> None:
        expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        ids = tokenizer.encode(text).ids
        assert ids == oracle.encode(expected)
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected

    check()


def test_the_kinds_differ_where_they_should(write_gguf: WriteGGUF) -> None:
    def tokens(pre: str, text: str) -> list[str]:
        path = write_gguf(metadata=tokenizer_metadata(pre, add_bos_token=False), name=f"{pre}.gguf")
        return build_tokenizer(open_gguf(path)).encode(text).tokens

    assert tokens("smollm", "123") == tokens("qwen2", "123") == ["1", "2", "3"]
    assert tokens("gpt-2", "1234") == tokens("llama-bpe", "1234") == ["123", "4"]
    assert tokens("gpt-2", " who") == ["Ġw", "h", "o"]
    assert tokens("llama-bpe", " who") == ["Ġwho"]


def test_control_tokens_are_special_and_others_are_not(write_gguf: WriteGGUF) -> None:
    tokenizer = build_tokenizer(open_gguf(write_gguf(metadata=tokenizer_metadata("gpt-2"))))
    encoding = tokenizer.encode("<s>hello<tool></s>")
    assert encoding.tokens == ["<s>", "hello", "<tool>", "</s>"]
    assert tokenizer.decode(encoding.ids) == "hello<tool>"


@pytest.mark.parametrize(
    ("pre", "changes", "tokens"),
    [
        ("gpt-2", {}, ["hello"]),
        ("llama-bpe", {}, ["<s>", "hello"]),
        ("llama-bpe", {"add_bos_token": False}, ["hello"]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ["<s>", "hello", "</s>"]),
        ("gpt-2", {"add_bos_token": True, "bos_token_id": None}, ["hello"]),
    ],
)
def test_what_surrounds_a_text(write_gguf: WriteGGUF, pre: str, changes: dict[str, Any], tokens: list[str]) -> None:
    tokenizer = build_tokenizer(open_gguf(write_gguf(metadata=tokenizer_metadata(pre, **changes))))
    assert tokenizer.encode("hello").tokens == tokens
    assert tokenizer.encode("hello", add_special_tokens=False).tokens == ["hello"]


# ---- the directory ----


def test_the_directory_is_made_once_for_a_content(write_gguf: WriteGGUF, cache: Path) -> None:
    lines: list[str] = []
    first = tokenizer_directory(open_gguf(write_gguf(metadata=tokenizer_metadata("gpt-2"))), lines.append)
    again = tokenizer_directory(
        open_gguf(write_gguf(metadata=tokenizer_metadata("gpt-2"), name="copy.gguf")), lines.append
    )
    other = tokenizer_directory(open_gguf(write_gguf(metadata=tokenizer_metadata("smollm"))), lines.append)
    assert first == again != other
    assert len(lines) == 2
    assert first.is_relative_to(cache)
    assert {path.name for path in first.iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "generation_config.json",
    }


def test_a_missing_chat_template_or_token_is_left_out(write_gguf: WriteGGUF) -> None:
    metadata = {**tokenizer_metadata("gpt-2", bos_token_id=None), "tokenizer.chat_template": None}
    directory = tokenizer_directory(open_gguf(write_gguf(metadata=metadata)), print)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "</s>"
    assert not {"chat_template", "bos_token", "pad_token"} & set(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "tekken"}, r"tokenizer\.ggml\.pre tekken"),
        ({"pre": None}, r"tokenizer\.ggml\.pre missing"),
        ({"model": "llama"}, "tokenizer of model llama"),
        ({"tokens": None}, r"no usable tokenizer\.ggml\.tokens"),
        ({"merges": ["h e", "he nowhere"]}, "damaged tokenizer"),
        ({"merges": ["he"]}, "damaged tokenizer"),
    ],
)
def test_what_is_not_supported_is_named(
    write_gguf: WriteGGUF, cache: Path, changes: dict[str, Any], message: str
) -> None:
    file = open_gguf(write_gguf(metadata=tokenizer_metadata("gpt-2", **changes)))
    with pytest.raises(ModelError, match=message):
        tokenizer_directory(file, print)
    assert not list(cache.rglob("*.json"))
