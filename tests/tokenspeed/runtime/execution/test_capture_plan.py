"""Which steps are captured for which flags."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.runtime.config import Config, GraphOptions, SchedulerOptions
from tokenspeed.runtime.execution.capture_plan import CapturePlan, plan_capture, prefill_ladder


def config(max_num_seqs: int = 256, max_num_batched_tokens: int = 2048, **graphs: object) -> Config:
    return Config(
        graphs=GraphOptions(**graphs),  # type: ignore[arg-type]
        scheduler=SchedulerOptions(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
    )


def test_a_cpu_captures_only_when_asked() -> None:
    assert plan_capture(config(), "cpu") == CapturePlan()
    assert plan_capture(config(cpu_graphs=True), "cpu").prefill == ()
    assert plan_capture(config(enforce_eager=True), "cuda") == CapturePlan()


def test_a_cpu_records_few_sizes_unless_told_otherwise() -> None:
    assert plan_capture(config(cpu_graphs=True), "cpu").decode == (1, 2, 4, 8)
    assert plan_capture(config(cpu_graphs=True, max_num_seqs=3), "cpu").decode == (1, 2, 3)


def test_default_decode_sizes() -> None:
    sizes = plan_capture(config(), "cuda").decode
    assert sizes[:5] == (1, 2, 4, 8, 16)
    assert sizes[-1] == 256
    assert len(sizes) == 35


@pytest.mark.parametrize(("most", "expected"), [(1, (1,)), (3, (1, 2, 3)), (10, (1, 2, 4, 8, 10)), (300, 256)])
def test_default_decode_sizes_end_at_max_num_seqs(most: int, expected: object) -> None:
    sizes = plan_capture(config(max_num_seqs=most), "cuda").decode
    assert sizes == expected or sizes[-1] == expected


def test_given_sizes_are_sorted_without_repeats() -> None:
    plan = plan_capture(config(cpu_graphs=True, cudagraph_capture_sizes=(8, 1, 8), prefill_graph_max_tokens=64), "cpu")
    assert plan.decode == (1, 8)
    assert plan.prefill == (16, 32, 64)


def test_no_bucket_is_larger_than_a_step() -> None:
    assert plan_capture(config(max_num_batched_tokens=100), "cuda").largest_prefill == 100


@given(st.integers(0, 1 << 15))
def test_the_ladder_pads_less_the_more_a_step_computes(largest: int) -> None:
    buckets = prefill_ladder(largest)
    assert list(buckets) == sorted(set(buckets))
    assert (buckets[-1] if buckets else 0) == (largest if largest >= 16 else 0)
    for smaller, larger in pairwise(buckets):
        assert larger <= (1.25 if smaller >= 256 else 1.5 if smaller >= 64 else 2) * smaller


def test_the_default_ladder_has_about_twenty_buckets() -> None:
    assert len(prefill_ladder(2048)) == 19
