"""Data sets have the lengths that were asked for, and are the same for the same seed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tokenspeed.bench.datasets import (
    RandomTexts,
    Sample,
    prefix_repetition_samples,
    random_samples,
    sharegpt_samples,
)
from tokenspeed.errors import ConfigError
from tokenspeed.offline.tokenizer import Tokenizer


def draw(tokenizer: Tokenizer, seed: int = 0, **lengths: float) -> list[Sample]:
    options = {"input_len": 40, "output_len": 8, "prefix_len": 0, "range_ratio": 0.0, **lengths}
    return random_samples(RandomTexts(tokenizer, np.random.default_rng(seed)), 12, **options)  # type: ignore[arg-type]


def test_random_prompts_have_the_tokens_that_were_asked_for(tokenizer: Tokenizer) -> None:
    samples = draw(tokenizer)
    assert [len(tokenizer.encode(sample.prompt)) for sample in samples] == [40] * 12
    assert all(sample.prompt_len == 40 and sample.output_len == 8 for sample in samples)
    assert len({sample.prompt for sample in samples}) == 12


def test_a_seed_fixes_the_prompts(tokenizer: Tokenizer) -> None:
    assert draw(tokenizer, 1) == draw(tokenizer, 1)
    assert draw(tokenizer, 1) != draw(tokenizer, 2)


def test_lengths_vary_within_the_range(tokenizer: Tokenizer) -> None:
    samples = draw(tokenizer, range_ratio=0.5)
    for lengths, middle in ([s.prompt_len for s in samples], 40), ([s.output_len for s in samples], 8):
        assert all(middle * 0.5 <= length <= middle * 1.5 for length in lengths)
        assert len(set(lengths)) > 2
    with pytest.raises(ConfigError, match="--random-range-ratio"):
        draw(tokenizer, range_ratio=1.0)


def test_random_prompts_share_a_prefix_where_asked(tokenizer: Tokenizer) -> None:
    samples = draw(tokenizer, prefix_len=32)
    ids = [tokenizer.encode(sample.prompt) for sample in samples]
    assert all(len(each) == 72 for each in ids)
    assert len({tuple(each[:24]) for each in ids}) == 1  # where text meets text, tokens may merge
    assert len({tuple(each[-24:]) for each in ids}) == 12


def test_prefixes_repeat_equally_often(tokenizer: Tokenizer) -> None:
    texts = RandomTexts(tokenizer, np.random.default_rng(0))
    options = {"num_prefixes": 3, "prefix_len": 32, "suffix_len": 16, "output_len": 4}
    samples = prefix_repetition_samples(texts, 12, **options)
    prefixes = Counter(tuple(tokenizer.encode(sample.prompt)[:24]) for sample in samples)
    assert sorted(prefixes.values()) == [4, 4, 4]
    assert len({sample.prompt for sample in samples}) == 12
    with pytest.raises(ConfigError, match="above the 2 prompts"):
        prefix_repetition_samples(texts, 2, **options)


def test_conversations_of_a_file_become_requests(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def turns(*texts: str) -> dict[str, object]:
        return {"conversations": [{"from": "human", "value": text} for text in texts]}

    good = [f"Tell me about the number {number}, please." for number in range(5)]
    answer = "It is a number like any other one."
    entries = [turns(question, answer) for question in good]
    entries += [turns("alone"), turns("Hi", answer), turns(good[0], "No"), turns("word " * 2000, answer), turns()]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(entries))

    def load(count: int, output_len: int | None = None) -> list[Sample]:
        return sharegpt_samples(path, tokenizer, np.random.default_rng(0), count, output_len=output_len)

    samples = load(5)
    assert {sample.prompt for sample in samples} == set(good)
    assert all(sample.output_len == len(tokenizer.encode(answer)) for sample in samples)
    assert [sample.prompt for sample in samples] != good
    assert Counter(sample.prompt for sample in load(12)).most_common()[-1][1] >= 2
    assert {sample.output_len for sample in load(6, output_len=3)} == {3}


NUMBERS = '[{"conversations": [{"value": 1}, {"value": "two"}]}]'


def test_a_file_of_another_form_is_told(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for content in ("{", "[1]", '{"a": 1}', '[{"conversations": [1, 2]}]', NUMBERS):
        path.write_text(content)
        with pytest.raises(ConfigError, match="ShareGPT"):
            sharegpt_samples(path, tokenizer, np.random.default_rng(0), 1, output_len=None)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="no conversation"):
        sharegpt_samples(path, tokenizer, np.random.default_rng(0), 1, output_len=None)
    with pytest.raises(ConfigError, match="ShareGPT"):
        sharegpt_samples(tmp_path / "none.json", tokenizer, np.random.default_rng(0), 1, output_len=None)
