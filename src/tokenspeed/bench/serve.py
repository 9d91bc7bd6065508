"""`ts bench serve`: load on a running server, and what it makes of it."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from tokenspeed.bench.arrivals import arrival_times
from tokenspeed.bench.client import ENDPOINTS, Backend, Client, RequestResult
from tokenspeed.bench.datasets import (
    RandomTexts,
    Sample,
    prefix_repetition_samples,
    random_samples,
    sharegpt_samples,
)
from tokenspeed.bench.metrics import METRICS, figures
from tokenspeed.bench.tokenizers import find_tokenizer
from tokenspeed.errors import ConfigError, ResourceError

PROBE = Sample(prompt="Hello", prompt_len=1, output_len=1)
"""The request that shows that the server answers; it leaves nothing in a prefix cache that is asked for later."""


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Which prompts."""

    name: str = "random"
    path: str | None = None
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    sharegpt_output_len: int | None = None
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Everything of one benchmark; names are those of the flags."""

    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    backend: Backend = "openai"
    base_url: str = "http://127.0.0.1:8000"
    endpoint: str | None = None
    header: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    tokenizer: str | None = None
    num_prompts: int = 1000
    num_warmups: int = 0
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0
    ignore_eos: bool = False
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters that every request has."""
    goodput: Mapping[str, float] = field(default_factory=dict)
    percentile_metrics: Sequence[str] = tuple(METRICS)
    metric_percentiles: Sequence[float] = (99.0,)
    profile: Mapping[str, Any] | None = None
    """Body of /start_profile; None does not profile."""
    progress: bool = True


@dataclass(frozen=True)
class Outcome:
    """What a benchmark found."""

    summary: dict[str, Any]
    """As `vllm bench serve` saves it."""
    details: dict[str, Any]
    """What it saves in addition with --save-detailed: one entry a request."""

    @property
    def errors(self) -> list[str]:
        """Why requests failed, each reason once."""
        return list(dict.fromkeys(error for error in self.details["errors"] if error))


async def run(options: ServeOptions) -> Outcome:
    """Make the load and measure it.

    Raises:
        TokenSpeedError: when the server cannot be reached, or refuses even a first request.
    """
    _check(options)
    endpoint = options.endpoint or ENDPOINTS[options.backend]
    headers = dict(options.header)
    if key := os.environ.get("OPENAI_API_KEY"):
        headers.setdefault("Authorization", f"Bearer {key}")
    async with Client(options.base_url, options.backend, endpoint, headers) as client:
        model = options.model or await client.served_model()
        tokenizer_name = options.tokenizer or model
        *samples, warmups = _samples(options, tokenizer_name)
        load = _Load(client, model, options)
        await load.probe()
        await load.warm(warmups)
        results, duration = await load.measure(samples)
    told = figures(
        results,
        duration,
        percentiles=options.metric_percentiles,
        metrics=options.percentile_metrics,
        goodput=options.goodput,
    )
    summary = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": options.backend,
        "model_id": model,
        "tokenizer_id": tokenizer_name,
        "num_prompts": options.num_prompts,
        "request_rate": options.request_rate if math.isfinite(options.request_rate) else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }
    return Outcome(summary | told, _details(results))


class _Load:
    """The requests of one benchmark."""

    def __init__(self, client: Client, model: str, options: ServeOptions) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._body: dict[str, Any] = dict(options.sampling)
        if options.ignore_eos:
            self._body["ignore_eos"] = True

    async def probe(self) -> None:
        """Refuse to go on where the server does not answer."""
        result = await self._send(PROBE)
        if not result.success:
            raise ResourceError(f"the server does not answer a first request: {result.error}")

    async def warm(self, samples: Sequence[Sample]) -> None:
        """Requests that are not measured, as many at a time as later."""
        if samples:
            await self._all(samples, [0.0] * len(samples), bar=None)

    async def measure(self, samples: Sequence[Sample]) -> tuple[list[RequestResult], float]:
        """The results of all samples, and the seconds that they took together."""
        options = self._options
        rng = np.random.default_rng([options.seed, 1])  # not the numbers that made the prompts
        times = arrival_times(len(samples), options.request_rate, options.burstiness, rng)
        if options.profile is not None:
            await self._client.call("/start_profile", options.profile)
        try:
            with tqdm(total=len(samples), disable=not options.progress, unit="req") as bar:
                started = time.perf_counter()
                results = await self._all(samples, times, bar)
                duration = time.perf_counter() - started
        finally:
            # After Ctrl-C as well: the server would record on. A profile of a number of steps ends by itself.
            if options.profile is not None and options.profile.get("num_steps") is None:
                await self._client.call("/stop_profile", {})
        return results, duration

    async def _all(
        self, samples: Sequence[Sample], times: Sequence[float], bar: tqdm[Any] | None
    ) -> list[RequestResult]:
        gate = asyncio.Semaphore(self._options.max_concurrency or len(samples))
        started = time.perf_counter()

        async def one(sample: Sample) -> RequestResult:
            async with gate:
                result = await self._send(sample)
            if bar is not None:
                bar.update()
            return result

        tasks = []
        for sample, at in zip(samples, times, strict=True):
            await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
            tasks.append(asyncio.create_task(one(sample)))
        return list(await asyncio.gather(*tasks))

    async def _send(self, sample: Sample) -> RequestResult:
        return await self._client.generate(self._model, sample, self._body)


def _samples(options: ServeOptions, tokenizer_name: str) -> list[Any]:
    """The prompts, and last the list of those that only warm up."""
    tokenizer = find_tokenizer(tokenizer_name)
    rng = np.random.default_rng([options.seed, 0])
    asked, count = options.dataset, options.num_prompts + options.num_warmups
    match asked.name:
        case "sharegpt":
            if asked.path is None:
                raise ConfigError("--dataset-name sharegpt needs --dataset-path, a JSON file of ShareGPT's form")
            samples = sharegpt_samples(Path(asked.path), tokenizer, rng, count, output_len=asked.sharegpt_output_len)
        case "prefix_repetition":
            samples = prefix_repetition_samples(
                RandomTexts(tokenizer, rng),
                count,
                num_prefixes=asked.prefix_repetition_num_prefixes,
                prefix_len=asked.prefix_repetition_prefix_len,
                suffix_len=asked.prefix_repetition_suffix_len,
                output_len=asked.prefix_repetition_output_len,
            )
        case _:
            samples = random_samples(
                RandomTexts(tokenizer, rng),
                count,
                input_len=asked.random_input_len,
                output_len=asked.random_output_len,
                prefix_len=asked.random_prefix_len,
                range_ratio=asked.random_range_ratio,
            )
    return [*samples[: options.num_prompts], samples[options.num_prompts :]]


def _details(results: Sequence[RequestResult]) -> dict[str, Any]:
    return {
        "input_lens": [result.prompt_len for result in results],
        "output_lens": [result.output_len for result in results],
        "ttfts": [result.ttft for result in results],
        "itls": [result.itls for result in results],
        "generated_texts": [result.text for result in results],
        "errors": [result.error for result in results],
    }


def _check(options: ServeOptions) -> None:
    for flag, value in (
        ("--num-prompts", options.num_prompts),
        ("--max-concurrency", options.max_concurrency),
        ("--random-input-len", options.dataset.random_input_len),
        ("--random-output-len", options.dataset.random_output_len),
        ("--sharegpt-output-len", options.dataset.sharegpt_output_len),
        ("--prefix-repetition-prefix-len", options.dataset.prefix_repetition_prefix_len),
        ("--prefix-repetition-suffix-len", options.dataset.prefix_repetition_suffix_len),
        ("--prefix-repetition-num-prefixes", options.dataset.prefix_repetition_num_prefixes),
        ("--prefix-repetition-output-len", options.dataset.prefix_repetition_output_len),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} must be 1 or more, not {value}")
    for flag, value in (
        ("--num-warmups", options.num_warmups),
        ("--seed", options.seed),
        ("--random-prefix-len", options.dataset.random_prefix_len),
    ):
        if value < 0:
            raise ConfigError(f"{flag} must be 0 or more, not {value}")
    for flag, rate in (("--request-rate", options.request_rate), ("--burstiness", options.burstiness)):
        if not rate > 0:
            raise ConfigError(f"{flag} must be above 0, not {rate:g}")
    if math.isinf(options.burstiness):
        raise ConfigError("--burstiness must be finite; give a large number for even gaps")
    for percentile in options.metric_percentiles:
        if not 0 <= percentile <= 100:
            raise ConfigError(f"--metric-percentiles must be between 0 and 100, not {percentile:g}")
