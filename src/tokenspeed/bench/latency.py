"""`ts bench latency`: how long one batch takes, from its prompts to its last token."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from tokenspeed.errors import ConfigError
from tokenspeed.llm import LLM
from tokenspeed.offline.params import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


def run(
    model: str,
    settings: Mapping[str, Any],
    *,
    input_len: int,
    output_len: int,
    batch_size: int,
    num_iters_warmup: int,
    num_iters: int,
    progress: bool,
) -> dict[str, Any]:
    """Answer the same batch of random prompts again and again.

    Returns:
        `avg_latency`, `latencies` and `percentiles`, in seconds, as `vllm bench latency` saves them.
    """
    for flag, value in (
        ("--input-len", input_len),
        ("--output-len", output_len),
        ("--batch-size", batch_size),
        ("--num-iters", num_iters),
    ):
        if value < 1:
            raise ConfigError(f"{flag} must be 1 or more, not {value}")
    if num_iters_warmup < 0:
        raise ConfigError(f"--num-iters-warmup must be 0 or more, not {num_iters_warmup}")
    # A prompt that was answered before would be read from the prefix cache.
    with LLM(model, **{"enable_prefix_caching": False, **settings}) as llm:
        rng = np.random.default_rng(0)
        prompts: list[Sequence[int]] = rng.integers(llm.info.vocab_size, size=(batch_size, input_len)).tolist()
        params = SamplingParams(temperature=1.0, max_tokens=output_len, ignore_eos=True)
        for _ in tqdm(range(num_iters_warmup), desc="warm-up", disable=not progress):
            llm.generate(prompts, params)
        latencies = []
        for _ in tqdm(range(num_iters), desc="measured", disable=not progress):
            started = time.perf_counter()
            llm.generate(prompts, params)
            latencies.append(time.perf_counter() - started)
    return {
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES},
    }
