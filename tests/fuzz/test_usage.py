"""How the memory of processes is told."""

from __future__ import annotations

from tests.fuzz.usage import Life, Usage, lives

MIB = 2**20


def test_each_process_has_a_life_of_its_own() -> None:
    seen = [{"front": Usage(1, MIB, 9, 9), "rank 0": Usage(pid, pid * MIB, 9, 9)} for pid in (5, 5, 7)]
    front, first, second = lives(seen)
    assert (front.role, front.rss) == ("front", [MIB] * 3)
    assert (first.first, len(first.rss), second.first, second.rss) == (0, 2, 2, [7 * MIB])
    assert second.figures() == {"role": "rank 0", "edits": "2 to 2", "rss_mib": [7, 7], "mib_per_100_edits": None}


def test_memory_that_grows_is_told_from_caches_that_fill_and_from_peaks() -> None:
    filled = [min(step, 100) * MIB for step in range(1000)]
    peaks = [(900 if step % 7 == 0 else 500) * MIB for step in range(1000)]
    growing = [(50_000 + 10 * step) * MIB // 100 for step in range(1000)]
    assert [Life("rank 0", 1, 0, rss).is_flat for rss in (filled, peaks, growing)] == [True, True, False]
    assert round(Life("rank 0", 1, 0, growing).per_100 or 0) == 10 * MIB
    assert Life("rank 0", 1, 0, growing[:199]).per_100 is None
