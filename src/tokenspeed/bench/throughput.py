"""`ts bench throughput`: how many tokens a second the engine makes of many prompts that wait at once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from tokenspeed.bench.datasets import sharegpt_samples
from tokenspeed.errors import ConfigError
from tokenspeed.llm import LLM
from tokenspeed.offline.params import SamplingParams

Asked = list[tuple[list[int], int]]
"""Prompts, and the tokens of their answers."""


def run(
    model: str,
    settings: Mapping[str, Any],
    *,
    dataset_name: str,
    dataset_path: str | None,
    num_prompts: int,
    input_len: int,
    output_len: int | None,
    seed: int,
    progress: bool,
) -> dict[str, Any]:
    """Answer all prompts.

    Returns:
        `elapsed_time` in seconds, `num_requests`, `total_num_tokens`, `requests_per_second` and `tokens_per_second`
        as `vllm bench throughput` saves them, and `output_tokens_per_second`.
    """
    for flag, value in (("--num-prompts", num_prompts), ("--input-len", input_len), ("--output-len", output_len)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} must be 1 or more, not {value}")
    with LLM(model, **{"enable_prefix_caching": False, **settings}) as llm:
        rng = np.random.default_rng(seed % 2**64)  # the engine's seed may be negative
        if dataset_name == "sharegpt":
            asked = _conversations(llm, dataset_path, rng, num_prompts, output_len)
        else:
            prompts = rng.integers(llm.info.vocab_size, size=(num_prompts, input_len)).tolist()
            asked = [(prompt, output_len or 128) for prompt in prompts]
        params = [SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True) for _, length in asked]
        inputs: Sequence[Sequence[int]] = [prompt for prompt, _ in asked]
        outputs = 0
        with tqdm(total=len(asked), disable=not progress, unit="req") as bar:
            started = time.perf_counter()
            for generation in llm.as_completed(inputs, params):
                outputs += len(generation.token_ids)
                bar.update()
            elapsed = time.perf_counter() - started
    tokens = sum(map(len, inputs)) + outputs
    return {
        "elapsed_time": elapsed,
        "num_requests": len(asked),
        "total_num_tokens": tokens,
        "requests_per_second": len(asked) / elapsed,
        "tokens_per_second": tokens / elapsed,
        "output_tokens_per_second": outputs / elapsed,
    }


def _conversations(llm: LLM, path: str | None, rng: np.random.Generator, count: int, output_len: int | None) -> Asked:
    if path is None:
        raise ConfigError("--dataset-name sharegpt needs --dataset-path, a JSON file of ShareGPT's form")
    tokenizer = llm.tokenizer
    samples = sharegpt_samples(Path(path), tokenizer, rng, count, output_len=output_len)
    return [(tokenizer.encode(sample.prompt), sample.output_len) for sample in samples]
