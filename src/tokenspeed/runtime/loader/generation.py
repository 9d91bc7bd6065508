"""What generation_config.json says: which tokens end a text, and how tokens are drawn by default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tokenspeed.errors import ModelError

_SAMPLING_RANGES = {
    "temperature": (0.0, float("inf")),
    "top_p": (math.ulp(0.0), 1.0),
    "top_k": (-1.0, float("inf")),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


def end_token_ids(generation: Mapping[str, Any]) -> tuple[int, ...]:
    """`eos_token_id` as a tuple, whether it is one id, a list, or missing.

    Raises:
        ModelError: if it is something else.
    """
    value = generation.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ModelError(f"generation_config.json has eos_token_id {value!r}; give a token id or a list of them")
    return tuple(ids)


def default_sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    """`temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, those given; a `top_k` of 0 is off, as -1 is.

    Raises:
        ModelError: for a value that cannot be used.
    """
    sampling: dict[str, float] = {}
    for name, (least, most) in _SAMPLING_RANGES.items():
        value = generation.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not least <= value <= most:
            raise ModelError(f"generation_config.json has {name} {value!r}; correct it or remove it")
        sampling[name] = max(0, int(value)) if name == "top_k" else float(value)
    return sampling
