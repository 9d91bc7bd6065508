"""A short run of random edits, valid and broken, under load; `benchmarks/reload_fuzz.py` runs long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import GRAPHS, SMALL
from tests.e2e.harness import dump
from tests.fuzz.campaign import Campaign, Settings
from tests.fuzz.program import Kinds
from tests.waiting import PATIENCE


@pytest.mark.parametrize(
    ("seed", "kinds", "count"),
    [(15, Kinds(), 15), (10, Kinds(ranks=2, graphs=True), 30)],
    ids=["one-rank", "two-ranks-with-graphs"],
)
def test_random_edits_leave_the_server_as_it_was_or_as_a_fresh_one(
    tiny_model: Path, tmp_path: Path, seed: int, kinds: Kinds, count: int
) -> None:
    flags = (*SMALL, *(GRAPHS if kinds.graphs else ()), "--tensor-parallel-size", str(kinds.ranks))
    flags += ("--reload-rank-timeout", str(PATIENCE))
    settings = Settings(seed, str(tiny_model), flags, kinds, count=count, fresh_every=count // 3, limit_s=PATIENCE)
    result = Campaign(settings, tmp_path).run()
    summary = result.summary()
    assert min(result.committed, result.failed) >= 0.3 * settings.count, dump(summary)
    assert result.fresh >= 1 and result.compared > 0, dump(summary)
    assert {"recaptured", "swapped"} <= result.came.keys() if kinds.graphs else result.came["eager"], dump(summary)
    assert result.came["not finite"] and {"wait", "keep", "abort"} == summary["modes"].keys(), dump(summary)
    for grown in result.growth():
        # The first grammar loads libraries of 150 MiB, at any time.
        assert (grown.fds <= 2, grown.threads <= 2, grown.rss < 512 * 2**20) == (True, True, True), dump(summary)
