from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.errors import ModelError
from tokenspeed.runtime.loader.generation import default_sampling, end_token_ids


@pytest.mark.parametrize(
    ("value", "expected"), [(None, ()), (2, (2,)), ([128001, 128009], (128001, 128009)), (0, (0,)), ([], ())]
)
def test_end_tokens(value: Any, expected: tuple[int, ...]) -> None:
    assert end_token_ids({"eos_token_id": value}) == expected
    assert end_token_ids({}) == ()


@pytest.mark.parametrize("value", ["2", 1.5, [1, None], -1, True])
def test_end_tokens_that_are_none(value: Any) -> None:
    with pytest.raises(ModelError, match="eos_token_id"):
        end_token_ids({"eos_token_id": value})


def test_sampling() -> None:
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "eos_token_id": 2}
    assert default_sampling(generation) == {"temperature": 0.6, "top_p": 0.9, "top_k": 50}
    assert default_sampling({"temperature": None, "top_k": -1}) == {"top_k": 0}
    assert default_sampling({"repetition_penalty": 1, "min_p": 0.05}) == {"repetition_penalty": 1.0, "min_p": 0.05}
    assert default_sampling({}) == {}


@pytest.mark.parametrize(
    "generation",
    [
        {"temperature": -1},
        {"temperature": True},
        {"temperature": float("inf")},
        {"top_p": 1.5},
        {"top_p": 0},
        {"top_p": [0.9]},
        {"top_k": "40"},
        {"top_k": float("inf")},
        {"min_p": 2},
        {"min_p": float("nan")},
        {"repetition_penalty": 0},
    ],
)
def test_sampling_that_cannot_be(generation: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(generation))):
        default_sampling(generation)
