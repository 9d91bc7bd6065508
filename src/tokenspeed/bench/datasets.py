"""Prompts to send, and how long each answer is to be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenspeed.errors import ConfigError
from tokenspeed.offline.tokenizer import Tokenizer

SHORTEST = 4
"""Tokens that prompt and answer of a conversation need at least to be taken."""

LONGEST_PROMPT, LONGEST_TOTAL = 1024, 2048
"""Longer conversations are left out; the bounds are those of vLLM's benchmark."""

LENGTH_ATTEMPTS = 10
"""Times that a random text is cut or lengthened until it has the asked number of tokens."""


@dataclass(frozen=True)
class Sample:
    """One request to be."""

    prompt: str
    prompt_len: int
    """Tokens of the prompt, without those of a chat template."""
    output_len: int
    """Most tokens of the answer; all of them are made with --ignore-eos."""


class RandomTexts:
    """Texts of random tokens, reproducible by the seed."""

    def __init__(self, tokenizer: Tokenizer, rng: np.random.Generator) -> None:
        self._tokenizer = tokenizer
        self.rng = rng
        backend = tokenizer.backend
        special = {token for token, entry in backend.get_added_tokens_decoder().items() if entry.special}
        self._ids = np.array([i for i in range(backend.get_vocab_size()) if i not in special], dtype=np.int64)

    def ids(self, count: int) -> list[int]:
        """Random token ids, none of them special."""
        drawn: list[int] = self.rng.choice(self._ids, count).tolist()
        return drawn

    def sample(self, ids: list[int], output_len: int) -> Sample:
        """A request whose text has about the tokens `ids`.

        Decoded ids rarely encode to themselves: the text is cut or lengthened until their number is right. Where
        that does not come about, the number of the text as it is goes into the sample.
        """
        wanted, text = len(ids), ""
        for _ in range(LENGTH_ATTEMPTS):
            text = self._tokenizer.decode(ids)
            ids = self._tokenizer.encode(text)
            if len(ids) == wanted:
                break
            ids = ids[:wanted] + self.ids(max(0, wanted - len(ids)))
        return Sample(text, len(ids), output_len)

    def length(self, middle: int, range_ratio: float) -> int:
        """A whole number between `middle * (1 - range_ratio)` and `middle * (1 + range_ratio)`, 1 at least."""
        low, high = int(middle * (1 - range_ratio)), int(middle * (1 + range_ratio))
        return max(1, int(self.rng.integers(low, high + 1)))


def random_samples(
    texts: RandomTexts, count: int, *, input_len: int, output_len: int, prefix_len: int, range_ratio: float
) -> list[Sample]:
    """Random prompts of about `input_len` tokens behind a common prefix of `prefix_len`.

    Raises:
        ConfigError: when `range_ratio` is not in [0, 1).
    """
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"--random-range-ratio must be 0 or more and below 1, not {range_ratio:g}")
    prefix = texts.ids(prefix_len)
    return [
        texts.sample(prefix + texts.ids(texts.length(input_len, range_ratio)), texts.length(output_len, range_ratio))
        for _ in range(count)
    ]


def prefix_repetition_samples(
    texts: RandomTexts, count: int, *, num_prefixes: int, prefix_len: int, suffix_len: int, output_len: int
) -> list[Sample]:
    """Prompts that share one of `num_prefixes` prefixes, equally often, in random order.

    Raises:
        ConfigError: when there are fewer prompts than prefixes.
    """
    if count < num_prefixes:
        raise ConfigError(f"--prefix-repetition-num-prefixes {num_prefixes} is above the {count} prompts; lower it")
    prefixes = [texts.ids(prefix_len) for _ in range(num_prefixes)]
    samples = [
        texts.sample(prefixes[index % num_prefixes] + texts.ids(suffix_len), output_len) for index in range(count)
    ]
    return shuffled(samples, texts.rng)


def sharegpt_samples(
    path: Path, tokenizer: Tokenizer, rng: np.random.Generator, count: int, *, output_len: int | None
) -> list[Sample]:
    """First question and answer of conversations in a file of ShareGPT's form; too few are taken several times.

    Args:
        path: JSON list of objects with `conversations`, a list of objects with `value`.
        output_len: of every answer; None takes the length of the one in the file.

    Raises:
        ConfigError: when the file cannot be used.
    """
    found: list[Sample] = []
    for question, answer in shuffled(_conversations(path), rng):
        prompt_len = len(tokenizer.encode(question))
        length = output_len or len(tokenizer.encode(answer, add_special_tokens=False))
        too_short = prompt_len < SHORTEST or (output_len is None and length < SHORTEST)
        if not too_short and prompt_len <= LONGEST_PROMPT and prompt_len + length <= LONGEST_TOTAL:
            found.append(Sample(question, prompt_len, length))
        if len(found) == count:
            break
    if not found:
        raise ConfigError(f"{path} has no conversation of a length that fits; take another --dataset-path")
    return [found[index % len(found)] for index in range(count)]


def shuffled(items: Sequence[Any], rng: np.random.Generator) -> list[Any]:
    """A copy in random order."""
    return [items[index] for index in rng.permutation(len(items))]


def _conversations(path: Path) -> list[tuple[str, str]]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        turns = [entry.get("conversations", entry.get("conversation", [])) for entry in entries]
        return [(_text(turn[0]["value"]), _text(turn[1]["value"])) for turn in turns if len(turn) >= 2]
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(f"--dataset-path {path} is no file of ShareGPT's form ({error})") from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.50} is no text")
    return value
