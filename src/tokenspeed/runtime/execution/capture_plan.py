"""Which steps are captured."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.runtime.config import (
    DEFAULT_CPU_DECODE_SIZES,
    DEFAULT_DECODE_SIZES,
    SMALLEST_PREFILL_BUCKET,
    Config,
)

DEFAULT_PREFILL_TOKENS = 2048
"""Largest captured prefill on a GPU, unless --prefill-graph-max-tokens says otherwise."""

HALF_STEPS_FROM = 64
QUARTER_STEPS_FROM = 256
"""Tokens from which on the buckets are half and a quarter as far apart; see `prefill_ladder`."""


@dataclass(frozen=True)
class CapturePlan:
    """Decode batch sizes and prefill token buckets to capture, ascending; both empty when nothing is captured."""

    decode: tuple[int, ...] = ()
    prefill: tuple[int, ...] = ()

    @property
    def largest_prefill(self) -> int:
        """Tokens of the largest bucket, 0 without one."""
        return self.prefill[-1] if self.prefill else 0


def plan_capture(config: Config, device_type: str) -> CapturePlan:
    """What the options ask for on this kind of device.

    A CPU records nothing unless --cpu-graphs asks for it. Sizes above --max-num-seqs and buckets above
    --max-num-batched-tokens would never be replayed, so the defaults leave them out.
    """
    options = config.graphs
    if options.enforce_eager or (device_type == "cpu" and not options.cpu_graphs):
        return CapturePlan()
    most = config.scheduler.max_num_seqs
    sizes = options.cudagraph_capture_sizes
    if sizes is None:
        defaults = DEFAULT_CPU_DECODE_SIZES if device_type == "cpu" else DEFAULT_DECODE_SIZES
        sizes = (*(size for size in defaults if size < most), min(most, defaults[-1]))
    return CapturePlan(decode=tuple(sorted(set(sizes))), prefill=prefill_ladder(_prefill_tokens(config, device_type)))


def prefill_ladder(largest: int) -> tuple[int, ...]:
    """Buckets up to `largest` tokens: powers of two from 16; from 64 on also the step half way between them, and from
    256 on the quarters. Up to 2048 these are 19.

    Below 64 tokens a step is bound by reading the weights, and padding costs next to nothing; from 256 on, where it
    is bound by computing, at most a fifth of a bucket is padding. `largest` itself is the last bucket; below 16
    tokens there is none.
    """
    if largest < SMALLEST_PREFILL_BUCKET:
        return ()
    buckets: set[int] = set()
    size = SMALLEST_PREFILL_BUCKET
    while size < largest:
        parts = 4 if size >= QUARTER_STEPS_FROM else 2 if size >= HALF_STEPS_FROM else 1
        buckets.update(size + size * part // parts for part in range(parts))
        size *= 2
    return (*sorted(bucket for bucket in buckets if bucket < largest), largest)


def _prefill_tokens(config: Config, device_type: str) -> int:
    asked = config.graphs.prefill_graph_max_tokens
    if asked is None:
        asked = 0 if device_type == "cpu" else DEFAULT_PREFILL_TOKENS
    return min(asked, config.scheduler.max_num_batched_tokens)
